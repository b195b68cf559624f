"""LangChain's answer caches: read from an SQLite file as recorded calls, or recorded in a speculation cache in passing.

Entries of files are read as plain JSON and never deserialized into the objects that they name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.messages import AIMessage, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from precedent.cache.records import digest
from precedent.errors import PrecedentError, PromptError
from precedent.langchain.arguments import own_tenant
from precedent.langchain.messages import to_template_messages
from precedent.langchain.recent import Recent
from precedent.langchain.recorded_answers import AnswerReader
from precedent.runtime.process import Lock
from precedent.text.traces import Skip, Trajectory, trajectory_of

if TYPE_CHECKING:
    from precedent.langchain.chat_model import ChatPrecedent

TABLES = ("full_llm_cache", "full_md5_llm_cache")
"""The tables in which LangChain's `SQLiteCache` and `SQLAlchemyMd5Cache` keep prompts and responses."""

REMEMBERED = 10_000
"""Most answers to remember as already stored."""

log = logging.getLogger(__name__)


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


def _entries(path: Path) -> Iterator[tuple[str, str]]:
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
