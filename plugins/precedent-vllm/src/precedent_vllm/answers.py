"""vLLM's answers on their way to the client: token ids are gathered, and taken out where nobody asked for them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

UNFINISHED = (None, "abort", "error")
"""Finish reasons of answers that are not stored."""

_ENDS = (b"\n\n", b"\r\n\r\n")


@dataclass(slots=True)
class Gathered:
    """The token ids of one response's answers, by their index."""

    shows_ids: bool
    prompt: list[int] = field(default_factory=list)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    answers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: set[int] = field(default_factory=set)

    def take(self, body: Any) -> bool:
        """Take the ids of a response or a chunk; returns False for a chunk that only brought them."""
        if not isinstance(body, dict):
            return True
        self.prompt = self._taken(body, "prompt_token_ids") or self.prompt
        choices = [one for one in body.get("choices") or () if isinstance(one, dict)]
        told = [self._take_choice(one) for one in choices]
        return any(told) or not choices or self.shows_ids

    def _take_choice(self, choice: dict[str, Any]) -> bool:
        index = choice.get("index", 0)
        self.prompts[index] = self._taken(choice, "prompt_token_ids") or self.prompts.get(index, [])
        self.answers[index] += self._taken(choice, "token_ids")
        if choice.get("finish_reason") not in UNFINISHED:
            self.finished.add(index)
        said = choice.get("delta", choice.get("text", True))
        return bool(said or choice.get("finish_reason") or choice.get("logprobs"))

    def _taken(self, where: dict[str, Any], name: str) -> list[int]:
        found = where.get(name)
        if name in where and not self.shows_ids:
            where[name] = None
        return list(found) if isinstance(found, list) else []

    def whole(self) -> Iterator[tuple[list[int], list[int]]]:
        """Prompt and answer of everything that ended normally."""
        for index in sorted(self.finished):
            prompt, answer = self.prompts.get(index) or self.prompt, self.answers[index]
            if prompt and answer:
                yield prompt, answer


class Events:
    """Server-sent events, one JSON object each, in pieces as they come."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered, self._rest = gathered, b""

    def push(self, piece: bytes, *, last: bool) -> bytes:
        """What of it can go on to the client."""
        self._rest += piece
        out = b""
        while (end := _end_of_event(self._rest)) > 0:
            event, self._rest = self._rest[:end], self._rest[end:]
            out += self._changed(event)
        if last:
            out, self._rest = out + self._rest, b""
        return out

    def _changed(self, event: bytes) -> bytes:
        name, colon, data = event.strip().partition(b":")
        if name != b"data" or not colon or b"\n" in data:
            return event
        try:
            body = json.loads(data)
        except ValueError:  # as [DONE]
            return event
        if not self._gathered.take(body):
            return b""
        return event if self._gathered.shows_ids else b"data: " + written(body) + b"\n\n"


def _end_of_event(text: bytes) -> int:
    """Where the first whole event ends; 0 if there is none yet."""
    ends = [place + len(end) for end in _ENDS if (place := text.find(end)) >= 0]
    return min(ends, default=0)


def written(body: Any) -> bytes:
    """JSON as vLLM writes it: no spaces, no escapes."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
