"""A request on its way through the engine: one object with all of its progress, from submission to result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter

from precedent.config import PromptScores
from precedent.decoding.sequence import DecodingSequence, Emission
from precedent.drafters import Drafter
from precedent.drafters.base import Session
from precedent.drafters.sessions import begin_all, end_all
from precedent.engine.generation import Generation, GenerationResult
from precedent.runtime.fence import Fences
from precedent.sampling.logprobs import TokenLogprob, logprobs_after
from precedent.target import Slot, Target
from precedent.text.assembly import TextAssembler


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedSequence(DecodingSequence):
    """A sequence that an engine queues, admits, prefills and decodes, with its caller's handle.

    `actions` are called with its result, by the name of their fence. `early` holds the sessions that began on the
    caller's thread, until it is admitted. `kv_bytes` is the memory reserved for it; the first `prefix_tokens` of its
    prompt may be kept on disk. It has `started` once it owns a slot that was chosen for its prompt; until then another
    sequence, `shares_with`, may be computing the first `num_shared` tokens of its prompt. With `scores` every
    token of its prompt is computed and scored.
    """

    slot: Slot = field(init=False, repr=False)
    drafters: dict[str, Drafter]
    text: TextAssembler
    actions: Mapping[str, Callable[[GenerationResult], object]] = field(default_factory=dict)
    early: dict[str, Session | None] = field(default_factory=dict)
    kv_bytes: int = 0
    prefix_tokens: int = 0
    scores: PromptScores | None = None
    generation: Generation = field(default_factory=Generation)
    submitted: float = field(default_factory=perf_counter)
    last_emission: float = 0.0
    started: bool = False
    num_prefilled: int = 0
    num_shared: int = 0
    shares_with: QueuedSequence | None = None
    cached_prompt_tokens: int = 0
    answer: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids."""
        return self.request.prompt_ids

    @property
    def reusable_ids(self) -> tuple[int, ...]:
        """The prompt as it is compared with what is in memory: no token of it may come from there if it is scored."""
        return self.prompt_ids if self.scores is None else self.prompt_ids[:1]

    @property
    def num_missing(self) -> int:
        """Number of prompt tokens still to be computed, without the last one, which the first step computes."""
        return len(self.prompt_ids) - 1 - self.num_prefilled

    def begin(self, target: Target, fences: Fences) -> None:
        """Take an empty slot and begin the drafters: recall embeds while others prefill.

        A drafter that fails, or is switched off, is left out.
        """
        self.slot = target.new_slot()
        self.request = replace(self.request, target_slot=lambda: self.slot)
        self.sessions = begin_all(self.drafters, self.request, fences, self.early)
        self.early = {}

    def end(self, fences: Fences) -> None:
        """End the drafters, and release what refers to the sequence itself: a cycle would outlive it."""
        sessions, self.sessions = self.sessions, {}
        end_all(sessions, fences)
        self.request = replace(self.request, target_slot=None)

    def release_slot(self) -> None:
        """Let go of the slot: the sequence may wait for a while until its completion is stored."""
        with suppress(AttributeError):  # starting it failed
            del self.slot

    def prefill(self, target: Target, num_tokens: int) -> bool:
        """Compute tokens of the prompt, `num_tokens` of those that are missing; True when only its last is pending."""
        if self.scores is None or not num_tokens:
            return target.continue_prefill(self.slot, self.prompt_ids, max(num_tokens, 1))
        logits = target.score_prompt(self.slot, self.prompt_ids, num_tokens)
        scored = self.prompt_ids[self.num_prefilled + 1 : self.num_prefilled + 1 + num_tokens]
        self.prompt_logprobs += logprobs_after(logits, scored, self.scores.num_top)
        return num_tokens == self.num_missing

    def deliver(self, result: Emission) -> None:
        """Pass a step's tokens to the caller. A stop string cuts the answer and ends the sequence."""
        text, kept = self.text.push(result.token_ids)
        if kept < len(result.token_ids) or self.text.stopped:
            del self.output_ids[len(self.output_ids) - len(result.token_ids) + kept :]
            self.finish_reason = "stop"
        if self.finished:
            text += self.text.flush()
            self.finish_reason = "stop" if self.text.stopped else self.finish_reason
        now = perf_counter()
        if self.last_emission:
            self.stats.inter_token.observe(now - self.last_emission, kept)
        else:
            self.stats.first_token_seconds = now - self.submitted
        self.last_emission = now
        self.answer.append(text)
        self.sources.extend(result.sources[:kept])
        self.logprobs.extend(result.logprobs[:kept])
        self.generation.put(Emission(text, result.token_ids[:kept], result.sources[:kept], result.logprobs[:kept]))

    def result(self) -> GenerationResult:
        """Return the result, once the sequence has ended normally."""
        assert self.finish_reason is not None
        self.stats.total_seconds = perf_counter() - self.submitted
        return GenerationResult(
            text="".join(self.answer),
            token_ids=tuple(self.output_ids),
            sources=tuple(self.sources),
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt_ids),
            cached_prompt_tokens=self.cached_prompt_tokens,
            stats=self.stats,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
