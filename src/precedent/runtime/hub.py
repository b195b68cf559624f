"""Asks the Hugging Face hub once whether it can be reached, instead of five times for every file of a model."""

from __future__ import annotations

from typing import Any


def silence_of_hub(repo_id: str, token: Any = None) -> str | None:
    """Why the hub cannot be reached, or None if it answers, whatever the answer."""
    return ask_hub(repo_id, token)[0]


def ask_hub(repo_id: str, token: Any = None, revision: str | None = None) -> tuple[str | None, bool]:
    """Why the hub cannot be reached, None if it answers, and whether it has the repository, but no config in it.

    Sends one request without retries through the hub's own client, so the user's mirrors and proxies apply. It times
    out after `HF_HUB_ETAG_TIMEOUT`, ten seconds by default.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set", False
    try:
        url = hf_hub_url(repo_id, "config.json", revision=revision)
        get_hf_file_metadata(url, token=token, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except EntryNotFoundError:
        return None, True
    except (HfHubHTTPError, HFValidationError):  # no such model, no access, or no valid name: still an answer
        return None, False
    except Exception as error:  # depends on the HTTP client that the hub's library uses
        return str(error).strip().split("\n", 1)[0] or type(error).__name__, False
    return None, False
