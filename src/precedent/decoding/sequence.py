"""The state of one request inside the decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from precedent.config import SpeculationConfig
from precedent.decoding.stats import GenerationStats
from precedent.drafters.base import DraftSession, DrawSession, ForwardSession
from precedent.drafters.request import Request
from precedent.errors import PrecedentError
from precedent.planning.calibration import Trust
from precedent.planning.planner import Limits
from precedent.runtime.failures import as_ours
from precedent.sampling.logprobs import TokenLogprob
from precedent.sampling.rng import Rng, RngOf
from precedent.target import Slot


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step added to a sequence: token ids, each token's source and, once they are detokenized, their text.

    A source is a drafter's name, or "target" for a token that the target model chose itself. `logprobs` has one entry
    per token if `SamplingParams.logprobs` asked for them. Text may lag behind its tokens (an unfinished character, a
    possible stop string) and may come without tokens.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """A request in the decode loop: its slot in the target model, its drafting sessions, its output so far.

    `rng_of(step)` gives the random numbers of a step; `sessions` maps drafter names to their sessions for this request.
    With `bitwise` the text must not depend on rounding. The sequence is decoded plainly once `plans` is False, because
    the planner failed. Do not step a sequence that has a `finish_reason` or an `error`, or no slot yet.
    """

    request: Request
    slot: Slot
    max_tokens: int
    rng_of: RngOf
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    bitwise: bool = False
    sessions: dict[str, DraftSession | DrawSession | ForwardSession] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    last_num_fixed: int | None = None
    plans: bool = True
    finish_reason: str | None = None
    error: PrecedentError | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    trust: Trust = field(default_factory=Trust)

    @property
    def finished(self) -> bool:
        """True once the sequence has ended or failed; it must not be stepped again."""
        return self.finish_reason is not None or self.error is not None

    def fail(self, error: Exception, doing: str) -> None:
        """End with an error; `doing` says what was going on."""
        self.error = as_ours(error, doing)

    def limits(self, requests: int = 1, rows_beside: int = 0, tokens_beside: float = 0.0) -> Limits:
        """What the next tree may hold, given the other sequences; leaves room for the token after an accepted path."""
        return Limits(
            max_nodes=self.speculation.max_nodes if self.speculation.enabled else 0,
            max_draws=self.speculation.max_draws if self.speculation.enabled else 0,
            max_depth=self.max_tokens - len(self.output_ids) - 1,
            end_token_ids=self.request.end_token_ids,
            requests=requests,
            rows_beside=rows_beside,
            tokens_beside=tokens_beside,
            trust=self.trust,
            prefix=self.prefix,
            one_path=self.slot.one_path,
            tenant=self.request.tenant,
        )

    @property
    def prefix(self) -> int:
        """Tokens whose keys and values the next tree sees."""
        return len(self.slot.token_ids)

    @property
    def drawing(self) -> dict[str, DrawSession]:
        """The sessions that sample from a model, by drafter name."""
        return {name: session for name, session in self.sessions.items() if isinstance(session, DrawSession)}

    @property
    def forwards(self) -> dict[str, ForwardSession]:
        """The sessions whose candidates cost a forward, by drafter name."""
        return {name: session for name, session in self.sessions.items() if isinstance(session, ForwardSession)}

    def rng(self) -> Rng:
        """The random numbers of the next step."""
        return self.rng_of(self.num_steps)

    def append(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Append a step's tokens up to an end token or the limit; returns those appended and sets `finish_reason`."""
        self.num_steps += 1
        for count, token in enumerate(token_ids, start=1):
            self.output_ids.append(token)
            if token in self.request.end_token_ids:
                self.finish_reason = "stop"
            elif len(self.output_ids) >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tuple(token_ids[:count])
        return tuple(token_ids)
