"""Stores earlier answers of any model as completions in a speculation cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage

from precedent.cache import Completion, prompt_fingerprint, tools_fingerprint
from precedent.errors import ConfigError, PrecedentError, PromptError, UnsupportedError
from precedent.langchain.messages import Media, template_messages_of
from precedent.text.prompt import render_prompt, told_answer
from precedent.text.query import recall_query
from precedent.text.template_settings import TemplateSettings
from precedent.text.traces import read_trajectories

if TYPE_CHECKING:
    from precedent.engine.engine import Engine
    from precedent.text.history import Message

log = logging.getLogger(__name__)

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
    media: Media = "refuse",
) -> int:
    """Store every assistant turn of `conversations`; return how many this model's chat template could render.

    A path names an OpenAI-format log (JSON Lines, optionally .gz). Its lines that cannot be read are skipped; a warning
    counts them and names the first. `settings` are passed on to the chat template, `media` to the messages. Raises
    ConfigError if the engine has no cache; PromptError or UnsupportedError, with the number of the conversation, for
    a list of messages that cannot be read.
    """
    if engine.cache is None:
        raise ConfigError("there is no speculation cache to warm: give the chat model speculation_cache=…")
    number = 0
    if isinstance(conversations, str | Path):
        talks = _logged(Path(conversations), media)
    else:
        talks = _talks(conversations, tools, media)
    for talk in talks:
        places = range(len(talk.turns))[-1 if talk.only_last else 0 :]
        how: dict[str, Any] = {"settings": settings, "tenant": tenant, "workflow_step": workflow_step}
        found = (completion_at(engine, talk, place, **how) for place in places)
        number += sum(engine.cache.insert(completion) > 0 for completion in found if completion is not None)
    return number


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation in template messages; with `only_last` only its last turn is stored."""

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
) -> Completion | None:
    """The turn at `place` as this engine's model would have generated it; None if it is not a usable answer."""
    before, turn = talk.turns[:place], talk.turns[place]
    if not before or turn["role"] != "assistant":
        return None
    answer = answer_ids(engine, before, turn, talk.tools, settings)
    if answer is None:
        return None
    prompt, token_ids = answer
    return Completion(
        token_ids=token_ids,
        tokenizer=engine.tokenizer_fingerprint,
        model="",  # unknown: the log does not say which weights gave this answer
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
    """The ids of the prompt and of `answer` after it; None if the template drops or empties the turn."""
    try:
        prompt = render_prompt(engine.tokenizer, before, tools, settings)
        told = told_answer(engine.tokenizer, prompt, before, answer, tools, settings)
    except PrecedentError:
        return None
    return (tuple(prompt), told) if told is not None and len(told) > 1 else None


def _talks(conversations: Iterable[Conversation], tools: Sequence[Mapping[str, Any]], media: Media) -> Iterator[Talk]:
    for number, messages in enumerate(_checked_list(conversations), start=1):
        try:
            yield Talk(template_messages_of(_checked_list(messages), media=media), tools)
        except (PromptError, UnsupportedError) as error:
            raise type(error)(f"conversation {number}: {error}") from error


def _logged(path: Path, media: Media) -> Iterator[Talk]:
    """The conversations of a log; those that cannot be read are counted in one warning at the end."""
    skipped = list[PrecedentError]()
    for logged in read_trajectories([path], skipped.append):
        try:
            yield Talk(template_messages_of(logged.messages, media=media), logged.tools, logged.only_last)
        except (PromptError, UnsupportedError) as error:
            skipped.append(type(error)(f"{logged.source}: {error}"))
    if skipped:
        log.warning("skipped conversations of %s: %d, the first because of %s", path, len(skipped), skipped[0])


def _checked_list(given: Any) -> Iterable[Any]:
    if isinstance(given, BaseMessage | str | Mapping) or not isinstance(given, Iterable):
        raise ConfigError("conversations must be lists of messages: give one list for each conversation")
    return given
