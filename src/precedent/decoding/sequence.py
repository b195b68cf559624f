"""The state of one request inside the decode loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.stats import GenerationStats
from precedent.drafters.base import Candidates, Drafting, DraftsAhead, DrawsRunnersUp
from precedent.errors import PrecedentError
from precedent.planning.plan import Limits
from precedent.planning.trust import Trust
from precedent.sampling.constraints import RowShaper
from precedent.sampling.logprobs import TokenLogprob
from precedent.sampling.probabilities import Coins, CounterCoins
from precedent.target import Slot

FEW = 8
"""Candidates that every drafter is always asked for, in nodes."""

WIDENED = ("greedy", "traversal", "topdown")
"""Modes that verify a second draw below one parent by its own law; a plan for siblings wants them all of one kind."""

RUNNERS_UP = DrawsRunnersUp.draw_runners_up.__name__
"""Looked for in each step: to ask whether an object is of a protocol takes far longer."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one sequence gained in one step: committed tokens and, for each, the source that proposed it.

    `logprobs` has one entry for each token where they were asked for.
    """

    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """A request in the target model: its slot, its drafters at work, its output so far.

    `coins_of(step)` gives the coins of a step (`entropy_coins`, or a test's); `draftings` maps drafter names to their
    work on this request, `draw_sources` names those that cost model steps, `drafting_ahead` holds those of them that
    work while the target scores (`decoding.pearl`). `num_tokens` is how many token ids the tokenizer has (None: nobody
    counted): what a wider output head says of others is cut off, and a damaged cache may propose any.
    """

    slot: Slot
    sampling: SamplingParams
    speculation: SpeculationConfig
    mode: str
    coins_of: Callable[[int], Coins]
    end_token_ids: frozenset[int]
    max_tokens: int
    shape: RowShaper | None = None
    draftings: dict[str, Drafting] = field(default_factory=dict)
    draw_sources: tuple[str, ...] = ()
    drafting_ahead: dict[str, DraftsAhead] = field(default_factory=dict)
    num_tokens: int | None = None
    output_ids: list[int] = field(default_factory=list)
    last_num_points: int | None = None
    finish_reason: str | None = None
    error: PrecedentError | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    trust: Trust = field(default_factory=Trust)

    @property
    def finished(self) -> bool:
        """True when it must not be stepped any more."""
        return self.finish_reason is not None or self.error is not None

    @property
    def limits(self) -> Limits:
        """What the next tree may hold: the token after an accepted path needs a place as well."""
        return Limits(
            max_nodes=self.speculation.max_nodes if self.speculation.enabled else 0,
            max_draws=self.speculation.max_draws if self.speculation.enabled else 0,
            max_depth=self.max_tokens - len(self.output_ids) - 1,
            end_token_ids=self.end_token_ids,
            at_hand={name: drafting.at_hand for name, drafting in self.drafting_ahead.items()},
            widening=self._widening(),
            trust=self.trust,
        )

    def _widening(self) -> tuple[str, ...]:
        """Sources that can name a second token beside a draw."""
        if self.mode not in WIDENED:
            return ()
        return tuple([name for name in self.draw_sources if hasattr(self.draftings[name], RUNNERS_UP)])

    @property
    def match_budget(self) -> int:
        """Candidates worth asking of each drafter: twice what the last tree could use, all that is allowed at first."""
        allowed = self.speculation.max_nodes if self.speculation.enabled else 0
        return allowed if self.last_num_points is None else min(allowed, max(FEW, 2 * self.last_num_points))

    @property
    def draws_at_hand(self) -> int:
        """Draws behind the committed text that were made while the target scored, and that no tree has held yet."""
        return sum(drafting.at_hand for drafting in self.drafting_ahead.values())

    def draft_ahead(self) -> None:
        """From now on let every drafting that can do it work while the target scores."""
        drawing = {name: self.draftings[name] for name in self.draw_sources}
        self.drafting_ahead = {name: one for name, one in drawing.items() if isinstance(one, DraftsAhead)}

    def match(self) -> list[Candidates]:
        """What every drafter proposes for the next step; nothing of one that names a token which does not exist."""
        budget = self.match_budget
        candidates = [drafting.match(budget) for drafting in self.draftings.values()]
        return [one if self._knows(one.token_ids) else Candidates(one.source) for one in candidates]

    def _knows(self, token_ids: Sequence[int]) -> bool:
        if self.num_tokens is None or not token_ids:
            return True
        return min(token_ids) >= 0 and max(token_ids) < self.num_tokens

    def coins(self) -> Coins:
        """The coins of the step that comes next."""
        return self.coins_of(self.stats.num_steps)

    def append(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Append tokens up to an end token or the limit; returns those that count and sets `finish_reason`."""
        for count, token in enumerate(token_ids, start=1):
            self.output_ids.append(token)
            if token in self.end_token_ids:
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tuple(token_ids[:count])
        return tuple(token_ids)


def entropy_coins(entropy: int) -> Callable[[int], Coins]:
    """Counter-based coins for every step, keyed by 128 bits of entropy."""
    return lambda step: CounterCoins(entropy, step)
