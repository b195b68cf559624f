"""What the middleware tells the workers about a request: one text among vLLM's own arguments, sealed.

Clients can send any text in `vllm_xargs`, and no seal: a worker believes what carries the secret's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any

from precedent.errors import ConfigError

NAME = "precedent"
"""The argument, in a request's `vllm_xargs` and in vLLM's `SamplingParams.extra_args`."""

OFF = "off"
"""What a request writes instead of a note to be decoded without speculation."""

MAX_CHARACTERS = 16_000_000
"""A longer text is not even looked at."""


@dataclass(frozen=True, slots=True)
class Note:
    """Whose request it is and what finds its likes; `on` is false if the request asked for no speculation."""

    on: bool = True
    tenant: str | None = None
    workflow_step: str = ""
    query: str = ""
    tools: str = ""
    prediction: str | None = None


NOTHING = Note()
"""A request that no middleware vouches for: only its own prompt is drafted from."""


def seal(note: Note, secret: bytes) -> str:
    """The text for a request's arguments. Raises ConfigError without a secret."""
    if not secret:
        raise ConfigError("there is no secret: vLLM must load the plugin 'precedent' (see VLLM_PLUGINS)")
    told = json.dumps(asdict(note), separators=(",", ":"))
    return f"{_mark(told, secret)}:{told}"


def unseal(text: Any, secret: bytes) -> Note | None:
    """What the middleware said; None for whatever else stands there."""
    if not secret or not isinstance(text, str) or len(text) > MAX_CHARACTERS:
        return None
    mark, _, told = text.partition(":")
    if not hmac.compare_digest(mark.encode("utf-8", "surrogatepass"), _mark(told, secret).encode()):
        return None
    return Note(**json.loads(told))


def _mark(told: str, secret: bytes) -> str:
    return hmac.new(secret, told.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
