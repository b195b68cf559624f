"""Asks the Hugging Face hub once, and without a network not five times for every file of a model."""

from __future__ import annotations

from typing import Any


def silence_of_hub(repo_id: str, token: Any = None) -> str | None:
    """Why the hub cannot be asked for a model from here, None where it answers, whatever it says.

    One request without repetition, by the hub's own client: mirrors and proxies are the user's. It waits no longer than
    `HF_HUB_ETAG_TIMEOUT`, ten seconds by default, for a network that swallows what it is given.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), token=token, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):  # no such model, not for this user, not a model's name: answers
        return None
    except Exception as error:  # of whatever HTTP client the hub's library uses
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    return None
