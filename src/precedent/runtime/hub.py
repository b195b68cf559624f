"""Checks once whether the Hugging Face hub can be reached, instead of five times for every file of a model."""

from __future__ import annotations

from typing import Any


def silence_of_hub(repo_id: str, token: Any = None) -> str | None:
    """Why the hub cannot be reached, or None if it answers, whatever the answer.

    Sends one request without retries through the hub's own client, so the user's mirrors and proxies apply. It times
    out after `HF_HUB_ETAG_TIMEOUT`, ten seconds by default.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), token=token, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):  # no such model, no access, or no valid name: still an answer
        return None
    except Exception as error:  # depends on the HTTP client that the hub's library uses
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    return None
