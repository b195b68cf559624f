"""Answers that were given before, as completions of a speculation cache: whatever model gave them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from precedent.cache import NewCompletion
from precedent.cache.store.fingerprint import prompt_fingerprint
from precedent.errors import ConfigError, PrecedentError
from precedent.langchain.messages import template_messages_of
from precedent.text.prompt import render_prompt, told_answer
from precedent.text.query import recall_query
from precedent.text.template_settings import TemplateSettings
from precedent.text.tool_schema import tools_fingerprint
from precedent.text.traces import read_trajectories

if TYPE_CHECKING:
    from precedent.engine.engine import Engine
    from precedent.text.history import Message

Conversation = Sequence[Any]
"""Messages in any form that LangChain converts."""


def warm(
    engine: Engine,
    conversations: str | Path | Iterable[Conversation],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    settings: Sequence[TemplateSettings] = (),
    tenant: str = "default",
    workflow_step: str = "",
) -> int:
    """Store every assistant turn of `conversations`; returns how many could be told as answers of this model.

    A path is an OpenAI-format log (JSON lines, optionally .gz); `settings` are what the chat template is told beside.
    Raises ConfigError for an engine without a cache.
    """
    if engine.cache is None:
        raise ConfigError("there is no speculation cache to warm: give the chat model speculation_cache=…")
    number = 0
    for talk in _talks(conversations, tools):
        places = range(len(talk.turns))[-1 if talk.only_last else 0 :]
        how: dict[str, Any] = {"settings": settings, "tenant": tenant, "workflow_step": workflow_step}
        found = (completion_at(engine, talk, place, **how) for place in places)
        number += sum(engine.cache.insert(completion) > 0 for completion in found if completion is not None)
    return number


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation in template messages; with `only_last` only its last turn counts, others were stored before."""

    turns: list[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    only_last: bool = False


def completion_at(
    engine: Engine,
    talk: Talk,
    place: int,
    *,
    tenant: str,
    workflow_step: str = "",
    settings: Sequence[TemplateSettings] = (),
) -> NewCompletion | None:
    """The turn at `place` as this engine's model would have generated it; None where it is no answer of it."""
    before, turn = talk.turns[:place], talk.turns[place]
    if not before or turn["role"] != "assistant":
        return None
    answer = answer_ids(engine, before, turn, talk.tools, settings)
    if answer is None:
        return None
    prompt, token_ids = answer
    return NewCompletion(
        token_ids=token_ids,
        tokenizer=engine.tokenizer_fingerprint,
        model="",  # nobody can tell which weights gave this answer
        tenant=tenant,
        query=recall_query(before),
        prompt_fingerprint=prompt_fingerprint(prompt),
        tools=tools_fingerprint(talk.tools),
        workflow_step=workflow_step,
        text=str(engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)),
    )


def answer_ids(
    engine: Engine,
    before: Sequence[Message],
    answer: Message,
    tools: Sequence[Mapping[str, Any]],
    settings: Sequence[TemplateSettings] = (),
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The prompt's ids and those of `answer` behind it; None where the template tells no such turn, or an empty one."""
    try:
        prompt = render_prompt(engine.tokenizer, before, tools, settings)
        told = told_answer(engine.tokenizer, prompt, before, answer, tools, settings)
    except PrecedentError:
        return None
    return (tuple(prompt), told) if told is not None and len(told) > 1 else None


def _talks(conversations: str | Path | Iterable[Conversation], tools: Sequence[Mapping[str, Any]]) -> Iterator[Talk]:
    if isinstance(conversations, str | Path):
        for logged in read_trajectories([Path(conversations)]):
            yield Talk(template_messages_of(logged.messages), logged.tools, logged.only_last)
        return
    for messages in _checked_list(conversations):
        yield Talk(template_messages_of(_checked_list(messages)), tools)


def _checked_list(given: Any) -> Iterable[Any]:
    if isinstance(given, BaseMessage | str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError("conversations to warm from are lists of messages, one list for each conversation")
    return given
