"""A scheduler driven by hand, on a target that notes every forward and fails where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.decoding.loop import DecodeLoop
from precedent.drafters import Drafter, Request
from precedent.drafters.prompt import PromptDrafter
from precedent.engine.admission import Admission
from precedent.engine.delivery import Finisher
from precedent.engine.queued_sequence import QueuedSequence
from precedent.engine.scheduler import Scheduler
from precedent.errors import PrecedentError
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.runtime.background import AtOnce
from precedent.sampling.rng import entropy_rng
from precedent.target import Slot, TargetModel
from precedent.text.assembly import TextAssembler
from precedent.tree import CandidateTree
from precedent_testing.drafters import RandomDrafter
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
MANY_ROUNDS = 3000


class WatchedTarget(TargetModel):
    """A target that notes how many prompt tokens and sequences each forward had, and fails where it is told to."""

    def __init__(self, seed: int = 41) -> None:
        super().__init__(tiny_causal_lm("llama", seed=seed, num_hidden_layers=2))
        self.pieces: list[int] = []
        self.batches: list[int] = []
        self.guilty: Callable[[Slot], Exception | None] = lambda slot: None

    def continue_prefill(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> bool:
        """Note the piece, or fail."""
        self._check(slot)
        before = len(slot.token_ids)
        done = super().continue_prefill(slot, prompt_ids, max_tokens)
        self.pieces.append(len(slot.token_ids) - before)
        return done

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[torch.Tensor]:
        """Note the batch, or fail as a whole, with rows written: a forward does not say whose fault it was."""
        self.batches.append(len(batch))
        scored = super().score(batch)
        for slot, _ in batch:
            self._check(slot)
        return scored

    def _check(self, slot: Slot) -> None:
        error = self.guilty(slot)
        if error is not None:
            raise error


def scheduler_on(target: TargetModel, limits: EngineLimits | None = None) -> Scheduler:
    """A scheduler whose finished requests are reported at once."""
    limits, loop = limits or EngineLimits(), DecodeLoop(target, Planner(CostCurve()))
    finish = Finisher(AtOnce(), loop.aids.fences)
    return Scheduler(loop, Admission(target, limits), finish, limits.prefill_tokens_per_round)


def request_for(
    target: TargetModel,
    prompt: Sequence[int],
    *drafters: Drafter,
    max_tokens: int = 8,
    speculation: SpeculationConfig | None = None,
    tenant: str = "default",
) -> QueuedSequence:
    """A greedy request, by default drafted from its prompt and by an adversary."""
    chosen = drafters or (PromptDrafter(), RandomDrafter(259))
    sampling = SamplingParams(max_tokens=max_tokens)
    return QueuedSequence(
        request=Request("test", tuple(prompt), sampling, tenant=tenant, mode="greedy", num_tokens=len(TOKENIZER)),
        max_tokens=max_tokens,
        rng_of=entropy_rng(0),
        speculation=speculation or SpeculationConfig(),
        drafters={drafter.name: drafter for drafter in chosen},
        text=TextAssembler(TOKENIZER),
        kv_bytes=target.kv_bytes(len(prompt) + max_tokens + 39),
    )


def prompt_of(length: int, number: int = 0) -> list[int]:
    """A prompt that repeats itself now and then; different numbers share no first token."""
    return [number, *((7 * i * i + 3 * number) % 90 for i in range(length - 1))]


def run(scheduler: Scheduler) -> None:
    """Rounds until nothing is left to do."""
    for _ in range(MANY_ROUNDS):
        if scheduler.idle:
            return
        scheduler.round()
    raise AssertionError(f"requests are left after {MANY_ROUNDS} rounds: somebody starves")


def answer_alone(prompt: Sequence[int], max_tokens: int = 8) -> tuple[int, ...]:
    """What a fresh scheduler answers without drafters."""
    target = WatchedTarget()
    scheduler, request = scheduler_on(target), request_for(target, prompt, max_tokens=max_tokens)
    request.drafters = {}
    scheduler.waiting.append(request)
    run(scheduler)
    return request.generation.result().token_ids


def nothing_is_held(scheduler: Scheduler) -> bool:
    """Whether all memory for keys and values is free again."""
    return scheduler.idle and (scheduler.admission.reserved_bytes, scheduler.admission.num_inside) == (0, 0)


def error_of(request: QueuedSequence) -> PrecedentError:
    with pytest.raises(PrecedentError) as caught:
        request.generation.result()
    return caught.value
