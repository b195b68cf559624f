"""`RecordingCache`: a LangChain answer cache that also stores its answers in a speculation cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.messages import AIMessage, BaseMessage, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from precedent.cache.records import digest
from precedent.errors import PrecedentError
from precedent.langchain.messages import to_template_messages
from precedent.langchain.recent import Recent
from precedent.langchain.recorded_answers import AnswerReader
from precedent.langchain.tenants import own_tenant
from precedent.runtime.process import Lock

if TYPE_CHECKING:
    from precedent.langchain.chat_model import ChatPrecedent

REMEMBERED = 10_000
"""Most answers to remember as already stored."""

log = logging.getLogger(__name__)


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
        if "speculation" in answer.response_metadata:
            return False
        key = digest(json.dumps([prompt, answer.content, answer.tool_calls], default=str), size=16)
        with self._lock:
            known = key in self._known
            self._known[key] = None
        return not known

    def _store(self, prompt: str, answer: AIMessage) -> bool:
        engine = self._llm.engine
        if engine.cache is None:
            return False
        settings = self._llm.template_settings({})
        reader = AnswerReader(engine.tokenizer, tenant=self._tenant, settings=settings)
        completion = reader.completion(to_template_messages([*_messages_in(prompt), answer]), ())
        return engine.cache.insert(completion) > 0


def _messages_in(prompt: str) -> list[BaseMessage]:
    """The messages of a cache's key, which LangChain writes as serialized constructors."""
    written = [message["kwargs"] for message in json.loads(prompt)]
    return messages_from_dict([{"type": one["type"], "data": one} for one in written])
