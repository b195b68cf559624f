"""`RecordingCache`: an answer cache of LangChain that hands its answers on to a speculation cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.messages import AIMessage, BaseMessage, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from precedent.errors import PrecedentError
from precedent.langchain.messages import to_template_messages
from precedent.langchain.recent import Recent
from precedent.langchain.tenants import own_tenant
from precedent.langchain.warming import Talk, completion_at
from precedent.runtime.process import Lock

if TYPE_CHECKING:
    from precedent.langchain.chat_model import ChatPrecedent

REMEMBERED = 10_000
"""Answers that were handed on already and are not looked at again."""

log = logging.getLogger(__name__)


class RecordingCache(BaseCache):
    """Answers from `inner`, and teaches `llm`'s speculation cache every answer of a chat that passes: found or new.

    For moving to Precedent with a cache that is full: `set_llm_cache(RecordingCache(old_cache, llm))`. The answers of
    other chat models count as well; those that `llm` gives itself are stored by its engine anyway. Answers go to
    `llm`'s own tenant. What cannot be read as a chat is only cached; in a call nothing but `inner` ever raises. Raises
    ConfigError for a model whose tenant only runs can name.
    """

    def __init__(self, inner: BaseCache, llm: ChatPrecedent) -> None:
        self._tenant = own_tenant(llm, None)
        self.inner, self.num_recorded = inner, 0
        self._llm, self._lock = llm, Lock()
        self._known: Recent[bytes, None] = Recent(REMEMBERED)

    def __reduce__(self) -> tuple[type[RecordingCache], tuple[BaseCache, ChatPrecedent]]:
        """Pickled as what it was made of."""
        return type(self), (self.inner, self._llm)

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """What `inner` finds."""
        found = self.inner.lookup(prompt, llm_string)
        self._record(prompt, found or ())
        return found

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        """Keep an answer in `inner`."""
        self.inner.update(prompt, llm_string, return_val)
        self._record(prompt, return_val)

    def clear(self, **kwargs: Any) -> None:
        """Clear `inner`; the speculation cache forgets by its own `forget`."""
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
        key = hashlib.blake2b(
            json.dumps([prompt, answer.content, answer.tool_calls], default=str).encode(), digest_size=16
        ).digest()
        with self._lock:
            known = key in self._known
            self._known[key] = None
        return not known

    def _store(self, prompt: str, answer: AIMessage) -> int:
        engine = self._llm.engine
        if engine.cache is None:
            return 0
        talk = Talk(to_template_messages([*_messages_in(prompt), answer]))
        settings = self._llm.template_settings({})
        found = completion_at(engine, talk, len(talk.turns) - 1, tenant=self._tenant, settings=settings)
        return 0 if found is None else int(engine.cache.insert(found) > 0)


def _messages_in(prompt: str) -> list[BaseMessage]:
    """The messages of a cache's key, which LangChain writes as constructors with their arguments."""
    written = [message["kwargs"] for message in json.loads(prompt)]
    return messages_from_dict([{"type": one["type"], "data": one} for one in written])
