"""What a server may be asked to hold and for how long: limits of requests, of the queue, and of time."""

from __future__ import annotations

from dataclasses import dataclass, fields

from precedent.config import check_fields
from precedent.engine.health import STALLED_SECONDS
from precedent.runtime.plain_values import is_number, is_whole

MEBIBYTE = 1 << 20

MOST_BODY_BYTES = 8 * MEBIBYTE
"""Of a body, however long the context is."""

BYTES_PER_TOKEN = 32
"""Of a body's texts (the conversation, a prediction, templates), for each token of the context; English has 4."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds on what callers may ask for. Raises ConfigError for a value that is none.

    `max_queued` answers may run or wait at once, `max_queued_per_key` of one key; beyond them a request is refused with
    429. A key may make `requests_per_minute` and use `tokens_per_minute` for prompts and answers, unless the key file
    gives it limits of its own (None: any number). `max_connections` may be open at once. `max_upload_bytes` of bodies
    that are not read to their ends may be held at once, `max_upload_bytes_per_key` of one key. A body has at most
    `max_body_bytes` (None: what the context of the served models can use, see `most_body_bytes`). `default_max_tokens`
    bounds answers whose request says nothing. `max_stored_per_key` responses of one key are stored, in
    `max_stored_bytes_per_key`, and all in `max_stored_bytes`.
    Times are in seconds: `request_seconds` for a whole answer, `header_seconds` for a request's headers to arrive,
    `upload_seconds` for its body, `prepare_seconds` for prompts and grammars, `stored_seconds` for responses after
    their last use, `grace_seconds` for running requests when the server stops. `/health` fails while an engine works
    on one step for `stalled_seconds`.
    """

    max_queued: int = 256
    max_queued_per_key: int = 64
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_choices: int = 16
    max_connections: int = 512
    max_body_bytes: int | None = None
    max_upload_bytes: int = 256 * MEBIBYTE
    max_upload_bytes_per_key: int = 64 * MEBIBYTE
    max_schema_bytes: int = 256 * 1024
    max_pattern_length: int = 1000
    max_stops: int = 16
    default_max_tokens: int = 4096
    max_stored_per_key: int = 1000
    max_stored_bytes: int = 256 * MEBIBYTE
    max_stored_bytes_per_key: int = 64 * MEBIBYTE
    stored_seconds: float = 86_400.0
    request_seconds: float = 600.0
    header_seconds: float = 10.0
    upload_seconds: float = 30.0
    prepare_seconds: float = 30.0
    grace_seconds: float = 30.0
    stalled_seconds: float = STALLED_SECONDS

    def most_body_bytes(self, context_length: int) -> int:
        """Bytes of the longest body that is read, for a model with such a context."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return min(BYTES_PER_TOKEN * context_length + 3 * self.max_schema_bytes, MOST_BODY_BYTES)

    def __post_init__(self) -> None:
        rules = list[tuple[str, bool, str]]()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_seconds"):
                rules.append((field.name, is_number(value) and value > 0, "must be above 0"))
            elif value is not None or field.default is not None:
                rules.append((field.name, is_whole(value) and value >= 1, "must be at least 1"))
        check_fields(self, rules)
