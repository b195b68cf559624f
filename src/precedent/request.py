"""A request on its way through the engine, and the handle that its caller holds."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from precedent.config import SamplingParams, SpeculationConfig
from precedent.constraints import RowShaper, constraints_for
from precedent.drafters import Drafter, DraftRequest
from precedent.generation import Generation, GenerationResult
from precedent.logprobs import TokenLogprob
from precedent.sequence import DecodingSequence, entropy_coins
from precedent.stats import GenerationStats
from precedent.target import TargetModel
from precedent.templates import Template
from precedent.text.assembly import TextAssembler


@dataclass(slots=True, eq=False)
class Request:
    """What was asked for, how far it has come, and where its answer goes.

    `kv_bytes` is the memory set aside for it. It has `started` once its slot is its own; until then the first
    `num_shared` tokens of its prompt may be on their way in another request, `shares_with`.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationConfig
    mode: str
    drafters: dict[str, Drafter]
    text: TextAssembler
    tenant: str = "default"
    query: str = ""
    workflow_step: str = ""
    tools: str = ""
    prediction: tuple[int, ...] = ()
    templates: tuple[Template, ...] = ()
    grammar: RowShaper | None = None
    finished: Sequence[Callable[[GenerationResult], None]] = ()
    kv_bytes: int = 0
    generation: Generation = field(default_factory=Generation)
    sequence: DecodingSequence | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    submitted: float = field(default_factory=perf_counter)
    last_emission: float = 0.0
    started: bool = False
    num_prefilled: int = 0
    num_shared: int = 0
    shares_with: Request | None = None
    cached_prompt_tokens: int = 0
    answer: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stats.mode = self.mode

    @property
    def num_missing(self) -> int:
        """Prompt tokens that are still to be computed; the last one is computed by the first step."""
        return len(self.prompt_ids) - 1 - self.num_prefilled


def begin(request: Request, target: TargetModel, end_token_ids: frozenset[int], num_tokens: int) -> None:
    """Set the request's sequence up on an empty slot and begin the drafters: recall embeds while others prefill.

    `num_tokens` is how many the tokenizer has. Raises what a drafter raises; those begun before are in the sequence.
    """
    request.stats.bitwise = target.bitwise and request.mode in ("greedy", "coupled")
    end_token_ids = end_token_ids | set(request.sampling.stop_token_ids)
    shape = constraints_for(request.sampling, request.prompt_ids, request.grammar)
    request.sequence = sequence = DecodingSequence(
        slot=target.new_slot(),
        sampling=request.sampling,
        speculation=request.speculation,
        mode=request.mode,
        coins_of=entropy_coins(secrets.randbits(128)),
        end_token_ids=end_token_ids,
        max_tokens=min(request.sampling.max_tokens, target.context_length - len(request.prompt_ids)),
        shape=shape,
        draw_sources=tuple(name for name, drafter in request.drafters.items() if drafter.draws),
        num_tokens=min(num_tokens, target.vocab_size),
        stats=request.stats,
    )
    draft_request = DraftRequest(
        request_id=hex(id(request)),
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        tenant=request.tenant,
        query=request.query,
        workflow_step=request.workflow_step,
        tools=request.tools,
        mode=request.mode,
        shape=shape,
        num_tokens=sequence.num_tokens,
        end_token_ids=end_token_ids,
        prediction=request.prediction,
        templates=request.templates,
        target_slot=lambda: sequence.slot,
    )
    for name, drafter in request.drafters.items():
        sequence.draftings[name] = drafter.begin(draft_request)
