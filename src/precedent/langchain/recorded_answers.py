"""Converts recorded answers of any model to completions with the prompt, query and answer of `ChatPrecedent`."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from precedent.cache import Completion, CompletionStore, Redact, prompt_fingerprint, tools_fingerprint
from precedent.cache.filling import FillCounts, Progress, Vectors, fill
from precedent.cache.records import check_tenant
from precedent.errors import ConfigError, PrecedentError, PromptError, UnsupportedError
from precedent.langchain.messages import Media, template_messages_of
from precedent.text.codec import TokenizerCodec
from precedent.text.prompt import render_prompt, told_answer
from precedent.text.query import recall_query
from precedent.text.template_settings import TemplateSettings
from precedent.text.traces import Message, Trajectory, read_trajectories

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.langchain.chat_model import ChatPrecedent

log = logging.getLogger(__name__)

Conversation = Sequence[Any]
"""Messages in any form that LangChain converts."""

_PLACE = re.compile(r"^.*? line \d+ ")


@dataclass(slots=True)
class Skipped:
    """What was skipped: a count and the first case for each reason."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, error: Exception, source: str = "") -> None:
        """Count an error by its reason, whichever line it comes from."""
        reason = _PLACE.sub("", str(error)).split(": ")[0]
        self.counts[reason] += 1
        self.first.setdefault(reason, f"{source}: {error}" if source else str(error))

    def as_list(self) -> list[dict[str, Any]]:
        """Reasons with their count and first case, most frequent first."""
        ordered = self.counts.most_common()
        return [{"reason": reason, "count": count, "first": self.first[reason]} for reason, count in ordered]


class AnswerReader:
    """Makes completions of one model from recorded answers; `settings` are those of its chat template.

    `skipped` counts what cannot be used.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tenant: str = "default",
        workflow_step: str = "",
        settings: Sequence[TemplateSettings] = (),
        media: Media = "refuse",
    ) -> None:
        check_tenant(tenant)
        self._tokenizer, self._codec, self._settings = tokenizer, TokenizerCodec(tokenizer), settings
        self._tenant, self._step, self._media = tenant, workflow_step, media
        self.skipped, self.num_read = Skipped(), 0

    def completions(self, trajectory: Trajectory) -> Iterator[Completion]:
        """The completions of a run's assistant turns in order, or of a single call's answer."""
        try:
            turns = template_messages_of(trajectory.messages, media=self._media)
        except PrecedentError as error:
            self.num_read += 1
            self.skipped.add(error, trajectory.source)
            return
        yield from self.answers(turns, trajectory.tools, only_last=trajectory.only_last)

    def answers(
        self, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, only_last: bool = False
    ) -> Iterator[Completion]:
        """The completions of a conversation's assistant turns, or with `only_last` that of the last turn."""
        places = [place for place, turn in enumerate(turns) if place and turn["role"] == "assistant"]
        for place in [len(turns) - 1] if only_last else places:
            self.num_read += 1
            try:
                yield self.completion(turns[: place + 1], tools)
            except PrecedentError as error:
                self.skipped.add(error)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self.skipped.add(PromptError(f"messages that cannot be read: {error!r}"))

    def completion(self, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Completion:
        """The last turn as this model would have generated it after the others.

        Raises PromptError for a turn that is not an answer, or that the chat template does not render after the prompt.
        """
        *before, answer = turns
        if not before or answer["role"] != "assistant" or not (answer["content"] or answer.get("tool_calls")):
            raise PromptError("an answer without text or tool calls")
        prompt = render_prompt(self._tokenizer, before, tools, self._settings)
        token_ids = told_answer(self._tokenizer, prompt, before, answer, tools, self._settings)
        if token_ids is None and answer.get("tool_calls"):
            raise PromptError("a tool call that the model's chat template does not render after the prompt")
        token_ids = token_ids or self._codec.answer_ids(answer["content"])
        return Completion(
            token_ids,
            self._codec.fingerprint,
            model="",  # unknown: no log says which weights gave this answer
            tenant=self._tenant,
            query=recall_query(before),
            prompt_fingerprint=prompt_fingerprint(prompt),
            tools=tools_fingerprint(tools),
            workflow_step=self._step,
            text=str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            created=time.time(),
        )


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


def warm(
    model: ChatPrecedent,
    conversations: str | Path | Iterable[Conversation],
    tools: Sequence[Mapping[str, Any]],
    *,
    tenant: str,
    workflow_step: str,
) -> int:
    """`ChatPrecedent.warm`, with its arguments checked."""
    engine = model.engine
    if engine.cache is None:
        raise ConfigError("there is no speculation cache to warm: give the chat model speculation_cache=…")
    reader = AnswerReader(
        engine.tokenizer,
        tenant=tenant,
        workflow_step=workflow_step,
        settings=model.template_settings({}),
        media=model.media,
    )
    if not isinstance(conversations, str | Path):
        numbered = enumerate(_checked(conversations), start=1)
        read = [_turns(number, messages, model.media) for number, messages in numbered]
        return sum(engine.cache.insert(one) > 0 for turns in read for one in reader.answers(turns, tools))
    logged, skipped = read_trajectories([Path(conversations)], reader.skipped.add), reader.skipped
    number = sum(engine.cache.insert(one) > 0 for call in logged for one in reader.completions(call))
    if skipped.counts:
        count, first = skipped.counts.total(), next(iter(skipped.first.values()))
        log.warning("skipped answers of %s: %d, the first because of %s", conversations, count, first)
    return number


def _turns(number: int, messages: Conversation, media: Media) -> list[Message]:
    try:
        return template_messages_of(_checked(messages), media=media)
    except (PromptError, UnsupportedError) as error:
        raise type(error)(f"conversation {number}: {error}") from error


def _checked(given: Any) -> Iterable[Any]:
    if isinstance(given, BaseMessage | str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError("conversations must be lists of messages: give one list for each conversation")
    return given
