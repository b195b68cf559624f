"""A request on its way through the engine: its settings, its progress and its answer."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from precedent.config import SpeculationConfig
from precedent.decoding.sequence import DecodingSequence
from precedent.decoding.stats import GenerationStats
from precedent.drafters import Drafter, Request
from precedent.drafters.together import Session, begin_all
from precedent.engine.generation import Generation, GenerationResult
from precedent.runtime.fence import Fences
from precedent.sampling.logprobs import TokenLogprob
from precedent.sampling.rng import entropy_rng
from precedent.target import Slot, TargetModel
from precedent.text.assembly import TextAssembler

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class InFlight:
    """A request with its progress and its caller's handle.

    `finished` are the calls that get its result, by the name of their fence. `early` holds the sessions that
    `begin_early` made for it, until it is admitted. `kv_bytes` is the memory reserved for it; the first `prefix_tokens`
    of its prompt may be kept on disk. It has `started` once it owns a slot; until then another request, `shares_with`,
    may be computing the first `num_shared` tokens of its prompt.
    """

    asked: Request
    speculation: SpeculationConfig
    drafters: dict[str, Drafter]
    text: TextAssembler
    finished: Mapping[str, Callable[[GenerationResult], object]] = field(default_factory=dict)
    early: dict[str, Session | None] = field(default_factory=dict)
    kv_bytes: int = 0
    prefix_tokens: int = 0
    generation: Generation = field(default_factory=Generation)
    sequence: DecodingSequence | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    submitted: float = field(default_factory=perf_counter)
    last_emission: float = 0.0
    started: bool = False
    num_prefilled: int = 0
    num_shared: int = 0
    shares_with: InFlight | None = None
    cached_prompt_tokens: int = 0
    answer: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stats.mode = self.asked.mode

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.asked.prompt_ids

    @property
    def num_missing(self) -> int:
        """Number of prompt tokens still to be computed, without the last one, which the first step computes."""
        return len(self.prompt_ids) - 1 - self.num_prefilled


def begin(request: InFlight, target: TargetModel, fences: Fences) -> None:
    """Create the request's sequence on an empty slot and begin its drafters: recall embeds while others prefill.

    A drafter that fails, or is switched off, is left out.
    """
    num_prompt, wanted = len(request.prompt_ids), request.asked.sampling.max_tokens
    room = target.most_answer_tokens(num_prompt)
    if room < wanted:
        log.info("max_tokens=%d: behind a prompt of %d tokens the context has room for %d", wanted, num_prompt, room)
    request.stats.bitwise = target.bitwise and request.asked.mode in ("greedy", "coupled")
    request.sequence = sequence = DecodingSequence(
        request=replace(request.asked, target_slot=partial(_slot_of, request)),
        slot=target.new_slot(),
        max_tokens=min(wanted, room),
        rng_of=entropy_rng(secrets.randbits(128)),
        speculation=request.speculation,
        bitwise=request.stats.bitwise,
        stats=request.stats,
    )
    sequence.sessions = begin_all(request.drafters, sequence.request, fences, request.early)
    request.early = {}


def _slot_of(request: InFlight) -> Slot:
    """The request's current slot; goes through the request, so that its sequence is not part of a reference cycle."""
    assert request.sequence is not None, "a request that has left the engine has no slot"
    return request.sequence.slot
