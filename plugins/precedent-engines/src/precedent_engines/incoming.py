"""Turns what callers say about a request into a checked `Request`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from precedent.cache import tools_fingerprint
from precedent.cache.records import check_tenant
from precedent.config import SamplingParams
from precedent.drafters import Request
from precedent.errors import ConfigError, ContextOverflowError, PromptError
from precedent.runtime.plain_values import shown
from precedent.text.codec import TokenizerCodec
from precedent.text.templates import Template, Templates
from precedent_engines.checks import token_ids_of

NO_TENANT = ""
"""The tenant of a request without one; no completion can have it."""


class Incoming:
    """Reads requests of one tokenizer; `context_length` is the longest prompt plus answer, None if not known."""

    def __init__(self, codec: TokenizerCodec, num_tokens: int | None, context_length: int | None) -> None:
        self._codec, self._num_tokens, self._context_length = codec, num_tokens, context_length

    def request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        tenant: str | None,
        query: str,
        workflow_step: str,
        tools: str | Sequence[Mapping[str, Any]],
        end_token_ids: Iterable[int],
        prediction: str | Sequence[int] | None,
        templates: Iterable[str | Template],
    ) -> Request:
        """The request. Raises ConfigError, PromptError, ContextOverflowError or CacheError, naming what is wrong."""
        if tenant is not None:
            check_tenant(tenant)
        for name, text in (("request_id", request_id), ("query", query), ("workflow_step", workflow_step)):
            if not isinstance(text, str):
                raise ConfigError(f"{name}={shown(text)} must be a text")
        prompt = tuple(token_ids_of(prompt_ids, "the prompt's ids"))
        return Request(
            request_id=request_id,
            prompt_ids=prompt,
            sampling=SamplingParams(),
            tenant=tenant or NO_TENANT,
            query=query,
            workflow_step=workflow_step,
            tools=fingerprint_of(tools),
            num_tokens=self._num_tokens,
            end_token_ids=frozenset(token_ids_of(end_token_ids, "the end tokens")),
            prediction=self._prediction(prediction, self.room_after(len(prompt))),
            templates=tuple(Templates(templates)),
        )

    def room_after(self, num_tokens: int) -> int | None:
        """Tokens that fit behind a prompt, None if not known. Raises PromptError or ContextOverflowError for none."""
        if not num_tokens:
            raise PromptError("the prompt is empty: give at least one token")
        if self._context_length is None:
            return None
        if num_tokens >= self._context_length:
            raise ContextOverflowError(
                f"the prompt has {num_tokens} tokens, the context holds {self._context_length}: no answer fits"
            )
        return self._context_length - num_tokens

    def _prediction(self, prediction: str | Sequence[int] | None, room: int | None) -> tuple[int, ...]:
        """The prediction's ids; a text that is too long however it is tokenized is refused before that."""
        if isinstance(prediction, str):
            if room is not None and len(prediction) > room * self._codec.longest_token:
                raise _too_long(f"{len(prediction)} characters", room)
            ids = self._codec.answer_ids(prediction)
        else:
            ids = tuple(token_ids_of(() if prediction is None else prediction, "the prediction's ids"))
        if room is not None and len(ids) > room:
            raise _too_long(f"{len(ids)} tokens", room)
        return ids


def fingerprint_of(tools: str | Sequence[Mapping[str, Any]]) -> str:
    """The fingerprint of tools that are given as their schemas, or as their fingerprint."""
    return tools if isinstance(tools, str) else tools_fingerprint(tools)


def _too_long(length: str, room: int) -> ContextOverflowError:
    return ContextOverflowError(
        f"the prediction has {length}, and the context has room for {room} tokens after the prompt: "
        "shorten it, or leave it out"
    )
