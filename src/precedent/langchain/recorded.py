"""Answers that any model gave before, as completions with the prompt, query and answer of `ChatPrecedent`.

They come from conversations, from logs, and from LangChain's answer caches, whose entries are read as plain JSON and
never deserialized into the objects that they name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.messages import AIMessage, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from precedent.cache import Completion, prompt_fingerprint, tools_fingerprint
from precedent.cache.records import check_tenant, digest
from precedent.errors import PrecedentError, PromptError
from precedent.langchain.arguments import own_tenant
from precedent.langchain.messages import Media, template_messages_of, to_template_messages
from precedent.runtime.process import Lock
from precedent.runtime.recent import Recent
from precedent.text.codec import TokenizerCodec
from precedent.text.prompt import render_prompt, told_answer
from precedent.text.query import recall_query
from precedent.text.template_settings import TemplateSettings
from precedent.text.traces import Message, Skip, Trajectory, trajectory_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.langchain.chat_model import ChatPrecedent

TABLES = ("full_llm_cache", "full_md5_llm_cache")
"""The tables in which LangChain's `SQLiteCache` and `SQLAlchemyMd5Cache` keep prompts and responses."""

REMEMBERED = 10_000
"""Most answers to remember as already stored."""

log = logging.getLogger(__name__)

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


# LangChain's answer caches


def is_answer_cache(path: Path) -> bool:
    """Whether a file is an SQLite database, and so may be a LangChain answer cache."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\x00"


def read_answer_cache(path: Path, skip: Skip) -> Iterator[Trajectory]:
    """The cached calls with their answers; `skip` gets an error for each entry that is not a chat call.

    Raises PromptError if the file is not an answer cache.
    """
    for number, (prompt, response) in enumerate(_entries(path), start=1):
        try:
            asked, answered = json.loads(prompt), json.loads(response)["kwargs"]
            run = {"inputs": {"messages": asked}, "outputs": {"generations": [answered]}}  # a LangSmith export's form
            yield trajectory_of(path, number, json.dumps(run))
        except PromptError as error:
            skip(error)
        except (ValueError, TypeError, AttributeError, KeyError):
            skip(PromptError(f"{path} line {number} is not a chat model's answer"))


def _entries(path: Path) -> Iterable[tuple[str, str]]:
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            found = [name for name in TABLES if name in names]
            if not found:
                raise PromptError(f"{path} is not a LangChain answer cache: it has no table {' or '.join(TABLES)}")
            for name in found:
                yield from connection.execute(f"SELECT prompt, response FROM {name} ORDER BY rowid")
    except sqlite3.Error as error:
        raise PromptError(f"cannot read {path}: {error}") from error


class RecordingCache(BaseCache):
    """Answers from `inner`, and stores every chat answer that it finds or keeps in `llm`'s speculation cache.

    Use it to move to Precedent with a filled cache: `set_llm_cache(RecordingCache(old_cache, llm))`. Answers of other
    chat models are stored too; `llm`'s own are skipped, because its engine stores them. All go to `llm`'s own tenant.
    An entry that is not a chat is only cached, and during a call only `inner` can raise. Raises ConfigError if `llm`
    takes its tenant only from runs.
    """

    def __init__(self, inner: BaseCache, llm: ChatPrecedent) -> None:
        self._tenant = own_tenant(llm, None)
        self.inner, self.num_recorded = inner, 0
        self._llm, self._lock = llm, Lock()
        self._known: Recent[bytes, None] = Recent(REMEMBERED)

    def __reduce__(self) -> tuple[type[RecordingCache], tuple[BaseCache, ChatPrecedent]]:
        return type(self), (self.inner, self._llm)

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """Look an answer up in `inner`."""
        found = self.inner.lookup(prompt, llm_string)
        self._record(prompt, found or ())
        return found

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Keep an answer in `inner`."""
        self.inner.update(prompt, llm_string, return_val)
        self._record(prompt, return_val)

    def clear(self, **kwargs: Any) -> None:
        """Clear `inner`; use the speculation cache's own `forget` to clear that."""
        self.inner.clear(**kwargs)

    def _record(self, prompt: str, answers: Sequence[Generation]) -> None:
        for answer in answers:
            message = answer.message if isinstance(answer, ChatGeneration) else None
            if isinstance(message, AIMessage) and self._is_new(prompt, message):
                try:
                    self.num_recorded += self._store(prompt, message)
                except (PrecedentError, ValueError, TypeError, KeyError) as error:
                    log.debug("an answer was not recorded: %s", error)

    def _is_new(self, prompt: str, answer: AIMessage) -> bool:
        key = digest(json.dumps([prompt, answer.content, answer.tool_calls], default=str), size=16)
        with self._lock:
            known = key in self._known or "speculation" in answer.response_metadata
            self._known[key] = None
        return not known

    def _store(self, prompt: str, answer: AIMessage) -> bool:
        engine = self._llm.engine
        if engine.cache is None:
            return False
        reader = AnswerReader(engine.tokenizer, tenant=self._tenant, settings=self._llm.template_settings({}))
        # the key of an answer holds its messages as serialized constructors
        asked = [{"type": one["kwargs"]["type"], "data": one["kwargs"]} for one in json.loads(prompt)]
        completion = reader.completion(to_template_messages([*messages_from_dict(asked), answer]), ())
        return engine.cache.insert(completion) > 0
