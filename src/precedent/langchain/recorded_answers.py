"""Converts recorded calls of any chat model to completions with the prompt, query and answer of `ChatPrecedent`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from precedent.cache import Completion, CompletionStore, Redact, prompt_fingerprint, tools_fingerprint
from precedent.cache.filling import FillCounts, Progress, Vectors, fill
from precedent.cache.records import check_tenant
from precedent.errors import PrecedentError, PromptError
from precedent.langchain.messages import template_messages_of
from precedent.text.codec import TokenizerCodec
from precedent.text.prompt import render_prompt, told_answer
from precedent.text.query import recall_query
from precedent.text.traces import Message, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACE = re.compile(r"^.*? line \d+ ")


@dataclass(slots=True)
class Skipped:
    """What was skipped: a count and the first case for each reason."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, error: Exception) -> None:
        """Count an error by its reason, whichever line it comes from."""
        reason = _PLACE.sub("", str(error)).split(": ")[0]
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, str(error))

    def as_list(self) -> list[dict[str, Any]]:
        """Reasons with their count and first case, most frequent first."""
        ordered = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return [{"reason": reason, "count": self.counts[reason], "first": self.first[reason]} for reason in ordered]


class AnswerReader:
    """Splits recorded runs into completions of one model; `skipped` counts what it cannot use."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, tenant: str = "default") -> None:
        check_tenant(tenant)
        self._tokenizer, self._codec, self._tenant = tokenizer, TokenizerCodec(tokenizer), tenant
        self.skipped = Skipped()
        self.num_read = 0

    def completions(self, trajectory: Trajectory) -> Iterator[Completion]:
        """The completions of a run's assistant turns in order, or of a single call's answer."""
        for place in answered_places(trajectory):
            self.num_read += 1
            try:
                yield self._completion(trajectory, place)
            except (PrecedentError, ValueError, TypeError, KeyError, AttributeError) as error:
                known = isinstance(error, PrecedentError)
                self.skipped.add(error if known else PromptError(f"messages that cannot be read: {error!r}"))

    def _completion(self, trajectory: Trajectory, place: int) -> Completion:
        *before, answer = template_messages_of(trajectory.messages[: place + 1])
        if not answer["content"] and not answer.get("tool_calls"):
            raise PromptError("an answer without text or tool calls")
        prompt = render_prompt(self._tokenizer, before, trajectory.tools)
        token_ids = self._behind(prompt, before, answer, trajectory.tools)
        return Completion(
            token_ids,
            self._codec.fingerprint,
            model="",  # unknown: no log says which weights gave this answer
            tenant=self._tenant,
            query=recall_query(before),
            prompt_fingerprint=prompt_fingerprint(prompt),
            tools=tools_fingerprint(trajectory.tools),
            text=str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            created=time.time(),
        )

    def _behind(
        self, prompt: list[int], before: list[Message], answer: Message, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        """The answer's ids as the chat template renders it, or those of its plain text if the template cannot."""
        told = told_answer(self._tokenizer, prompt, before, answer, tools)
        if told is not None:
            return told
        if answer.get("tool_calls"):
            raise PromptError("a tool call that the model's chat template does not render after the prompt")
        return self._codec.answer_ids(answer["content"])


def answered_places(trajectory: Trajectory) -> list[int]:
    """The positions of the answers among the messages."""
    messages = trajectory.messages
    if trajectory.only_last:
        return [len(messages) - 1]
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    return [place for place, role in enumerate(roles) if place and role == "assistant"]


def store_answers(
    store: CompletionStore,
    trajectories: Iterable[Trajectory],
    reader: AnswerReader,
    vectors: Vectors,
    progress: Progress | None = None,
    *,
    redact: Redact | None = None,
) -> FillCounts:
    """Store the answers of recorded runs; answers already stored change nothing, so that it can be resumed.

    `progress` is called with the number of answers in each stored batch. `redact` sees each answer before it is stored.
    Raises CacheError.
    """
    found = (one for trajectory in trajectories for one in reader.completions(trajectory))
    return fill(store, found, vectors, progress, redact=redact)
