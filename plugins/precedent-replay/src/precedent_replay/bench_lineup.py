"""Builds what `precedent bench` compares: one model, an engine per mode, and the caches that the engines draft from."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from precedent.cache import Completion, SpeculationCache, prompt_fingerprint, tokenizer_fingerprint
from precedent.cache.embedder import resolve
from precedent.config import SpeculationConfig
from precedent.drafters.kinds import kind_of, load_draft
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent_replay.bench_modes import (
    PROMPT_LOOKUP,
    Contestant,
    OracleOfPrompts,
    OurContestant,
    TransformersContestant,
    query_of,
)
from precedent_testing.drafters import NullDrafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""Maps prompt ids to the tokens of the plain answer."""

POISONED_PER_PROMPT = 4
RANDOM_COMPLETIONS = 32


class Lineup:
    """Loads the target once for our engines, and a second, unmodified copy for transformers; close it at the end.

    An engine or cache that a process leaves open may abort it while the interpreter ends.
    """

    def __init__(
        self,
        target: str,
        draft_model: str | None,
        device: str | None,
        dtype: str | None,
        max_tokens: int,
        *,
        draft_device: str | None = None,
        loop: str | None = None,
        cuda_graphs: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self._target, self._where = target, {"device": device, "dtype": dtype}
        self._draft_name, self._max_tokens = draft_model, max_tokens
        self.model: PreTrainedModel
        self.tokenizer: PreTrainedTokenizerBase
        self.model, self.tokenizer = load_target(target, device=device, dtype=dtype, chat_template=chat_template)
        self._loop, self._draft, self._held = loop, None, ExitStack()
        if draft_model:
            self._draft = load_draft(draft_model, self.model, self.tokenizer, device=draft_device)
        # all engines share it: with CUDA graphs, each separate one would take half of the remaining memory
        self._target_model = TargetModel(self.model, cuda_graphs=cuda_graphs)
        self._embedder = resolve(None)
        self._cost: CostCurve | None = None
        self.cache = self._new_cache()

    def ours(self, cache: SpeculationCache | None = None, **settings: Any) -> OurContestant:
        """A contestant with its own engine. The first engine measures the cost curve; the others start from a copy."""
        cost = None if self._cost is None else copy.deepcopy(self._cost)
        speculation = SpeculationConfig(**{"write_back": False, **settings})
        options = EngineOptions(draft_model=self._draft, cache=cache, speculation=speculation, loop=self._loop)
        engine = Engine(self._target_model, self.tokenizer, options, name=self._target, cost=cost)
        self._held.callback(engine.close)
        if self._cost is None:
            self._cost = copy.deepcopy(engine.planner.cost)
        return OurContestant(engine, self._max_tokens)

    def plain_answers(self, prompts: Sequence[Sequence[int]]) -> Answers:
        """The answers of plain decoding, from an engine outside the comparison."""
        plain = self.ours(enabled=False)
        try:
            return {tuple(prompt): plain(prompt).token_ids for prompt in prompts}
        finally:
            plain.engine.close()

    def contestants(self, modes: Sequence[str], answers: Answers) -> dict[str, Contestant]:
        """The contestant of each mode."""
        ours = {mode: self._ours(mode, answers) for mode in modes if mode in OURS}
        return {**self._transformers(modes), **ours}

    def _ours(self, mode: str, answers: Answers) -> OurContestant:
        if mode == "plain":
            return self.ours(enabled=False)
        if mode in ("null", "oracle"):
            contestant = self.ours(drafters=())
            contestant.engine.add_drafter(NullDrafter() if mode == "null" else OracleOfPrompts(answers))
            contestant.engine.speculation = SpeculationConfig(drafters=(mode,), write_back=False)
            return contestant
        if mode == "adversarial":
            return self.ours(self.poisoned_cache(answers))
        return self.ours(self.cache if mode == "ours" else self._new_cache())

    def _transformers(self, modes: Sequence[str]) -> dict[str, Contestant]:
        wanted = [mode for mode in modes if mode not in OURS]
        if not wanted:
            return {}
        where = self._where
        # our engines pack the linear layers of their model, so transformers gets its own copy
        untouched, _ = load_target(self._target, device=where["device"], dtype=where["dtype"])
        settings: dict[str, dict[str, Any]] = {"generate": {}, "prompt-lookup": PROMPT_LOOKUP}
        if self._draft_name and "assisted" in wanted:
            if kind_of(self._draft) is not None:
                raise ConfigError(
                    f"mode 'assisted' is transformers', which cannot use {self._draft_name}: name the other modes with "
                    "--modes"
                )
            settings["assisted"] = {"assistant_model": load_draft(self._draft_name, untouched, self.tokenizer)}
        return {mode: TransformersContestant(untouched, self._max_tokens, **settings[mode]) for mode in wanted}

    def _new_cache(self) -> SpeculationCache:
        cache = SpeculationCache.open(None, embedder=self._embedder)
        self._held.callback(cache.close)
        return cache

    def close(self) -> None:
        """Close all engines, then the caches that they draft from."""
        self._held.close()

    def poisoned_cache(self, answers: Answers) -> SpeculationCache:
        """A misleading cache: wrong answers stored for the measured prompts, and completions of random tokens.

        A wrong answer replaces every second token, so that the token after a match is always wrong.
        """
        cache, choose = self._new_cache(), random.Random(0)
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        for prompt, answer in answers.items():
            query, fingerprint = query_of(self.tokenizer, prompt), prompt_fingerprint(prompt)
            for shift in range(POISONED_PER_PROMPT):
                wrong = [
                    token if place % 2 == shift % 2 else choose.randrange(len(self.tokenizer))
                    for place, token in enumerate(answer)
                ]
                cache.insert(Completion(tuple(wrong), tokenizer, "", query=query, prompt_fingerprint=fingerprint))
        for number in range(RANDOM_COMPLETIONS):
            tokens = tuple(choose.randrange(len(self.tokenizer)) for _ in range(self._max_tokens))
            cache.insert(Completion(tokens, tokenizer, "", query=f"another topic, number {number}"))
        return cache


OURS = ("plain", "ours", "ours-cold", "adversarial", "null", "oracle")
