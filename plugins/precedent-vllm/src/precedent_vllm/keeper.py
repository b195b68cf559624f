"""Stores finished answers, on a thread of the HTTP server: workers do not know how an answer ended."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from precedent.errors import PrecedentError
from precedent_engines import DraftingService
from precedent_vllm.counts import Publisher, Series
from precedent_vllm.note import Note
from precedent_vllm.settings import Settings

_log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Answers that may wait for a slow store; more are not stored."""


class Keeper:
    """Opens the store when it is told to, or at the first answer; one that does not open is tried again at the next."""

    def __init__(self, settings: Settings, tokenizer: str) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._executor = ThreadPoolExecutor(1, "precedent-keeper")
        self._service: DraftingService | None = None
        self._lock = Lock()
        self._waiting = self._stored = self._lost = 0
        self._publisher = Publisher(settings.folder, self.counts)

    def warm_up(self) -> None:
        """Open the store and load its embedder, so that the first answer is stored at once; returns at once."""
        self._executor.submit(self._warm_up)

    def keep(self, pairs: Iterable[tuple[list[int], list[int]]], note: Note, model: str) -> None:
        """Store prompts and answers under the note's tenant; returns at once."""
        for prompt, answer in pairs:
            with self._lock:
                full = self._waiting >= MAX_WAITING
                self._waiting += not full
                self._lost += full
            if not full:
                self._executor.submit(self._keep, prompt, answer, note, model)

    def counts(self) -> Series:
        """What was counted so far, for Prometheus."""
        with self._lock:
            return {
                "precedent:stored_answers": {"": self._stored},
                "precedent:unstored_answers": {"": self._lost},
            }

    def publish(self) -> None:
        """Have the counts of this moment in the folder."""
        self._publisher.write()

    def close(self) -> None:
        """Store what waits, and close the store."""
        self._executor.shutdown(wait=True)
        if self._service is not None:
            self._service.close()
        self._publisher.close()

    def _keep(self, prompt: list[int], answer: list[int], note: Note, model: str) -> None:
        try:
            assert note.tenant is not None
            self._opened().write_back(
                prompt, answer, tenant=note.tenant, query=note.query, workflow_step=note.workflow_step,
                tools=note.tools, model=model,
            ).add_done_callback(self._done)  # fmt: skip
        except PrecedentError as error:
            self._count(stored=False)
            _log.warning("an answer was not stored: %s", error)

    def _warm_up(self) -> None:
        try:
            if (cache := self._opened().cache) is not None:
                cache.warm_up()
        except PrecedentError as error:
            _log.warning("the store is not ready, and is tried again at the first answer: %s", error)

    def _opened(self) -> DraftingService:
        if self._service is None:
            self._service = DraftingService(self._settings.store, self._tokenizer, (), embedder=self._settings.embedder)
        return self._service

    def _done(self, written: Future[int]) -> None:
        """Count it; the service logs what failed."""
        self._count(stored=not written.cancelled() and written.exception() is None)

    def _count(self, *, stored: bool) -> None:
        with self._lock:
            self._waiting -= 1
            self._stored += stored
            self._lost += not stored
