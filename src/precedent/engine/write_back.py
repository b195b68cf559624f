"""What happens when a request ends normally, before its caller is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from precedent.cache import Completion, prompt_fingerprint
from precedent.drafters import Request
from precedent.engine.generation import GenerationResult

WRITE_BACK, OBSERVER = "write-back", "the observer of results"
"""The names of both among the aids of an engine."""

ResultObserver = Callable[[tuple[int, ...], GenerationResult], None]
"""Called with a finished request's prompt ids and its result, on one of the engine's threads."""

CompletionKeeper = Callable[[Completion], object]
"""Takes a finished completion, on one of the engine's threads: `SpeculationCache.insert`, or a buffer for it."""


def at_normal_end(
    asked: Request, on_result: ResultObserver | None, store: CompletionKeeper | None, tokenizer: str, model: str
) -> dict[str, Callable[[GenerationResult], object]]:
    """The actions for a request's answer: call the observer, then store the completion with what was asked."""
    actions: dict[str, Callable[[GenerationResult], object]] = {}
    if on_result is not None:
        actions[OBSERVER] = partial(on_result, asked.prompt_ids)
    if store is not None:
        record = Completion(
            (), tokenizer, model, asked.tenant, asked.query,
            prompt_fingerprint(asked.prompt_ids), asked.tools, asked.workflow_step,
        )  # fmt: skip
        actions[WRITE_BACK] = partial(_write_back, store, record)
    return actions


def _write_back(store: CompletionKeeper, record: Completion, result: GenerationResult) -> None:
    store(replace(record, token_ids=result.token_ids, text=result.text))
