"""The set-up that is made once per model and kept for its lifetime: target model (on a twin), planner, drafters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from precedent.cache import SpeculationCache, model_fingerprint, tokenizer_fingerprint
from precedent.drafters import Drafter, DrafterParts, load_drafters
from precedent.engine.warm_up import compile_inner_loops
from precedent.errors import ConfigError
from precedent.planning.costs import StepCosts
from precedent.planning.planner import Planner
from precedent.runtime.background import Background
from precedent.runtime.fence import Fences
from precedent.runtime.process import Lock, check_fork, computing, this_process
from precedent.target import TargetModel
from precedent_generate.twin import state_of, twin_of

Speculators = Sequence[str | Drafter]
"""Names of installed drafters, or drafters themselves."""


@dataclass
class Prepared:
    """A model ready for our loop. Hold `lock` during a step, because all running calls share planner and drafters.

    `made_in` is the id of the process that owns its threads.
    """

    target: TargetModel
    planner: Planner
    state: tuple[Any, ...]
    lock: threading.RLock = field(default_factory=threading.RLock)
    executor: Executor = field(default_factory=lambda: Background(1, "precedent-generate"))
    made_in: int = field(default_factory=this_process)
    fences: Fences = field(default_factory=Fences)
    _cache: SpeculationCache | None = None
    _named: dict[tuple[str, str], Drafter] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """The model's fingerprint, stored with every completion."""
        return model_fingerprint(self.target.model.config.to_dict(), self.target.model.state_dict())

    def drafters(self, wanted: Speculators, cache: SpeculationCache | None, tokenizer: str) -> dict[str, Drafter]:
        """The drafters of a call by name; those given by name are kept with their indices. Raises ConfigError."""
        with self.lock:
            if cache is not self._cache:
                self._named, self._cache = {}, cache
            made = [self._named_drafter(one, tokenizer) if isinstance(one, str) else one for one in wanted]
        return {drafter.name: drafter for drafter in made}

    def _named_drafter(self, name: str, tokenizer: str) -> Drafter:
        if (name, tokenizer) not in self._named:
            made = load_drafters([name], DrafterParts(tokenizer, self.executor, self._cache, fences=self.fences))
            if not made:
                raise ConfigError(f"drafter {name!r} has nothing to draft from here: {_missing(name)}")
            self._named[name, tokenizer] = made[0]
        return self._named[name, tokenizer]


def _missing(name: str) -> str:
    if name == "recall":
        return "give speculation_cache=… as well"
    if name in ("block-draft", "eagle"):
        return "it reads the layers of an engine's target: give the draft to Engine or ChatPrecedent"
    return "a draft model goes in as a drafter object, DraftModelDrafter(TargetModel(draft_model))"


_PREPARING = Lock()
_PREPARED: weakref.WeakKeyDictionary[PreTrainedModel, Prepared] = weakref.WeakKeyDictionary()
_TOKENIZERS: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


def prepared_for(model: PreTrainedModel) -> Prepared:
    """The model's set-up, made on the first call and again after the model was changed or the process forked.

    Raises UnsupportedError for a model whose layers cannot be rewound.
    """
    check_fork()
    with _PREPARING, computing():
        known, state = _PREPARED.get(model), state_of(model)
        if known is not None and known.state == state and known.made_in == this_process():
            return known
        compile_inner_loops()
        target = TargetModel(twin_of(model))
        if known is None:
            costs = StepCosts()
            costs.measure(target.measure_costs, lambda: target.threads)
        _PREPARED[model] = Prepared(target, Planner(costs) if known is None else known.planner, state)
        return _PREPARED[model]


def fingerprint_of(tokenizer: Any) -> str:
    """The tokenizer's fingerprint, computed once unless tokens were added."""
    known = _TOKENIZERS.get(tokenizer)
    if known is None or known[0] != len(tokenizer):
        known = _TOKENIZERS[tokenizer] = (len(tokenizer), tokenizer_fingerprint(tokenizer))
    return known[1]
