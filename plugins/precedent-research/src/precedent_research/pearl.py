"""PEARL (2408.11850): the draft model draws while the target model scores, so that neither waits for the other.

While the target model scores a tree, the draft model continues its own chain beyond it. Its samples are used twice:

* *pre-verify*: the first of them hangs below a node that is being scored, and its verification needs only the row after
  that node. So this step verifies it already, as a leaf with a made-up row that is dropped when the leaf is accepted;
* *post-verify*: if that sample is accepted, the next tree starts with the samples after it, which cost no extra time.

A step without such samples (the first one, and after a rejection) does not wait for a draft either: the target model
scores the fixed candidates, or its pending token alone, while the draft model draws. The exception is drawing so cheap
that waiting for it pays off (`PearlPlanner`). docs/decisions/0017 shows why the output distribution stays the target's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from precedent.config import SpeculationConfig
from precedent.decoding.aids import Aids
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.proposal import Proposal, faults_of
from precedent.decoding.sequence import DecodingSequence, Emission
from precedent.decoding.verification import Forward, Verified
from precedent.drafters import Drafter, DrafterParts, Request
from precedent.drafters.base import Candidates, Draw, DrawSource
from precedent.drafters.model.distribution import DraftedToken
from precedent.drafters.model.drafter import DraftModelDrafter, DraftModelSession
from precedent.drafters.model.place import Place
from precedent.errors import ConfigError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.planning.gate import FAR_BEHIND, Gate
from precedent.planning.planner import MARGIN, Limits, Plan, Planner, Step
from precedent.runtime.background import Background
from precedent.runtime.fence import Fences
from precedent.sampling.rng import Rng
from precedent.sampling.row_shaper import RowShaper
from precedent.sampling.target_rows import TargetRows
from precedent.target import TargetModel
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Verdict, verifier_of

LEAST_PATIENCE, PATIENCE = 2.0, 20.0
"""A step waits for a draft model that is still drawing so many seconds, or so many times the target's forward."""

AHEAD = "drawing ahead"
"""The name of this loop's own work among the fences of an engine."""


# The draft model


@dataclass(frozen=True, slots=True)
class PearlSource(DrawSource):
    """A session that draws ahead: `at_hand` samples are ready for the next tree."""

    at_hand: int = 0


class PearlSession(DraftModelSession):
    """A draft model's chain for one request, which grows beyond its part of the tree while the target scores it.

    `chain` continues the committed text; its first `num_shown` tokens are in this step's tree, and no tree has held the
    others. Verification depends on none of those except the first, which it may test. So if the committed text agrees
    with the chain, the others are as good as fresh samples. It may draw ahead on another thread than the target
    model's, but never concurrently with other work of the drafter. One that `failed` draws nothing more.
    """

    names_runners_up = False  # a second sample would need a row that was not kept
    failed = False

    @property
    def at_hand(self) -> int:
        """Samples that no tree has held yet; `draw` uses these before it makes new ones."""
        return len(self.chain) - self.num_shown

    def source(self) -> PearlSource:
        """Return what the planner needs to know before this step's draws."""
        return PearlSource(self.behind, at_hand=self.at_hand)

    def draw_together(self, draws: Sequence[Draw]) -> None:
        """Draw for several sessions; samples drawn ahead cost nothing now."""
        ready = [draw for draw in draws if isinstance(draw.session, PearlSession) and draw.session.at_hand]
        super().draw_together(draws)
        for draw in ready:
            draw.seconds = 0.0

    def draw_ahead(self, rng: Rng) -> bool:
        """Sample one more token beyond all samples so far; False if none may follow.

        Its random number is keyed by its position in the answer.
        """
        before = len(self.chain)
        self.run(self.extend(rng, self.output_length + before, f"draft {self.drafter.name} ahead", ()))
        return len(self.chain) > before

    def extended(self, tree: CandidateTree, num_scored: int) -> CandidateTree:
        """Return the tree with the samples at hand whose parents were scored: at most one new node.

        Where the tree already continues like the chain, its nodes become sampled ones too.
        """
        builder, node = TreeBuilder.reopened(tree), ROOT
        for drafted in self.chain[: self.num_shown]:
            below = builder.child(node, drafted.token_id)
            assert below is not None, "a shown token is missing from the tree"
            node = below
        for drafted in self.chain[self.num_shown :]:
            node = self.handed_on(drafted).add_to(builder, node, self.drafter.name)
            if node >= num_scored:
                break
        return builder.build()

    def unseen_after(self, token_ids: Sequence[int]) -> list[DraftedToken]:
        """Return the unseen tokens beyond the committed ones if these agree with the chain, none otherwise.

        A token that was in the tree is never used again, whatever was committed: its verdict depended on it.
        """
        agreed = [drafted.token_id for drafted in self.chain[: len(token_ids)]] == list(token_ids)
        return self.chain[len(token_ids) :] if agreed and len(token_ids) >= self.num_shown else []

    def committed(self, token_ids: Sequence[int]) -> None:
        """Append the committed tokens and keep the samples that still hold."""
        unseen = self.unseen_after(token_ids)
        super().committed(token_ids)
        self.chain = unseen


class PearlDrafter(DraftModelDrafter):
    """A draft model on a CUDA stream of its own, so that it can draw while the target scores."""

    def __init__(self, model: TargetModel, *, hand_to: torch.device | None = None) -> None:
        super().__init__(model, hand_to=hand_to)
        self._stream = _stream_on(model.device)

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig) -> int:
        """Return the most bytes that a request takes in the draft model's KV cache, samples drawn ahead included."""
        tree, ahead = speculation.max_nodes + speculation.max_draws + 1, speculation.max_draws + 1
        return self.kv_bytes(prompt_tokens, answer_tokens, tree + ahead)

    def session(self, request: Request, context: list[int], place: Place) -> PearlSession:
        """Return a session with keys and values in `place`."""
        return PearlSession(self, request, context, place)

    def at_work(self) -> AbstractContextManager[object]:
        """Return a context that keeps work on the model's tensors in order across threads."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def handed_on(self, distribution: Sampled) -> Sampled:
        """Return the distribution where the target verifies, safe from being overwritten."""
        if self._stream is not None:  # otherwise its memory may be reused before the target's stream has read it
            for each in (distribution.row, distribution.logits):
                if each is not None:
                    each.record_stream(torch.cuda.current_stream(each.device))
        return super().handed_on(distribution)


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream that waits for all work queued on this GPU so far; None for other devices."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


# The planner


class PearlPlanner(Planner):
    """A planner that also weighs samples drawn ahead, and whether to wait for more."""

    def plan(self, candidates: Sequence[Candidates], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """Choose candidates and draws; every source that draws ahead is in the plan, so that its leaf is learned."""
        plan = super().plan(candidates, draw_sources, limits)
        for name, source in draw_sources.items():
            if isinstance(source, PearlSource):
                plan.draws.setdefault(name, 0)
        return plan

    def observe_draws(self, source: str, num_draws: int, behind: int, milliseconds: float, together: int = 1) -> None:
        """Learn what draws cost; those that were ready took no time and say nothing."""
        if milliseconds > 0.0:
            super().observe_draws(source, num_draws, behind, milliseconds, together)

    def _num_draws(self, name: str, source: DrawSource, step: Step, requests: int) -> int:
        """Show samples at hand, or draw some now if that is worth the wait.

        The number shown must not depend on how many are at hand, since that reveals whether an end token was sampled.
        """
        if not isinstance(source, PearlSource):
            return super()._num_draws(name, source, step, requests)
        gate = self.gates.setdefault(name, Gate())
        if source.at_hand:
            return min(source.at_hand, self._best_number(name, step, lambda number: 0.0))
        if source.behind > FAR_BEHIND or not gate.measured:
            return 0
        gate.behind = source.behind
        time_of = self._time_of_draws(gate)
        number = self._best_number(name, step, time_of)
        return number if number and self._pays_to_wait(name, number, step, time_of(number)) else 0

    def _pays_to_wait(self, name: str, number: int, step: Step, milliseconds: float) -> bool:
        """Whether waiting for `number` draws beats a forward with nothing at hand.

        Both ways lead to the same steps with a tree: `runs` of them until the text leaves the chain. Before the first,
        one way waits for the draws; the other makes steps over its pending token until a sample drawn during one of
        them is accepted.
        """
        reaches = self._reaches(name, number + 1, step.calibration)
        tokens, runs = 1.0 + sum(reaches[:-1]), 1.0 / (1.0 - reaches[-1])
        alone, wide = self.checked.milliseconds(step.width), self.checked.milliseconds(step.width + number)
        steps_before = 1.0 / reaches[0]
        waiting = runs * tokens / (runs * wide + milliseconds)
        return waiting > (steps_before + runs * tokens) / (steps_before * alone + runs * wide)

    def num_draws_ahead(self, name: str, behind: int, limits: Limits) -> int:
        """Return how many samples a source may have at hand: one to verify at once, and those of the next tree.

        0 if recent steps waited for it longer than its samples save; it is tried again now and then.
        """
        if not limits.max_draws:
            return 0
        gate = self.gates.setdefault(_waiting_for(name), Gate())
        gate.behind, most = behind, limits.max_draws + 1
        reaches = self._reaches(name, limits.max_draws, self.calibrations.of(limits.tenant))
        alone, waited = self.checked.milliseconds(limits.rows_beside + 1), self._time_of_draws(gate)(1)
        pays = reaches[0] * sum(reaches) * alone > (MARGIN - 1.0) * alone + waited
        return most if gate.decide(most if pays else 0) else 0

    def observe_wait(self, name: str, behind: int, milliseconds: float) -> None:
        """Learn how long a step waited for a source that drew during its forward, `behind` by so many tokens."""
        self.gates.setdefault(_waiting_for(name), Gate()).observe(1, behind, milliseconds / self.checked.load)


def _waiting_for(name: str) -> str:
    """Return the name under which waits for a source are recorded, apart from its draws."""
    return f"waiting for {name}"


# The loop


@dataclass(slots=True, eq=False)
class _Drawing:
    """One sequence's draft model, drawing during a forward: at most `left` more samples."""

    sequence: DecodingSequence
    source: str
    session: PearlSession
    rng: Rng
    behind: int
    left: int
    made: int = 0
    seconds: float = 0.0
    error: Exception | None = None

    def draw_one(self) -> None:
        """Sample one token; a failure ends its drawing."""
        started = perf_counter()
        try:
            drawn = self.session.draw_ahead(self.rng)
        except Exception as error:
            self.error, drawn = error, False
        self.left = self.left - 1 if drawn else 0
        self.made += drawn
        self.seconds += perf_counter() - started


class PearlLoop(DecodeLoop):
    """Lets draft models draw on a thread of their own while the target scores, and verifies one sample more.

    They may draw on another `executor` too, which must run one job at a time; `close` shuts it down. Every draft model
    is idle again when `score` returns, even after an error. One that does not return in time is abandoned, and its
    drafter stays switched off until it does.
    """

    def __init__(
        self, target: TargetModel, planner: Planner, fences: Fences | None = None, executor: Executor | None = None
    ) -> None:
        super().__init__(target, planner, fences)
        self._executor = executor or Background(1, "precedent-draft")
        self._work: Future[None] | None = None

    @classmethod
    def planner(cls, cost: CostCurve) -> PearlPlanner:
        """Return a planner that weighs samples drawn ahead."""
        return PearlPlanner(cost)

    @classmethod
    def drafters(cls, parts: DrafterParts) -> Mapping[str, Drafter]:
        """Return a `draft-model` that draws ahead.

        Raises ConfigError without a draft model that draws token after token, or with a draft that reads what the
        target computed, and UnsupportedError for an early exit.
        """
        if parts.heads:
            reader = next(iter(parts.heads))
            raise ConfigError(
                f"loop='pearl' draws while the target scores, and {reader} reads what the target computed between two "
                f"steps: leave out the loop, or {reader}"
            )
        if parts.draft_model is None:
            raise ConfigError(
                "loop='pearl' lets a draft model draw token after token while the target scores: give such a "
                "draft_model= as well (a block draft or an EAGLE head is not one)"
            )
        if parts.early_exit:
            raise UnsupportedError(
                "loop='pearl' does not work with an early exit (first-layers:N), which reads the keys and values that "
                "the target is writing: give a separate draft model, or leave the loop out"
            )
        return {DraftModelDrafter.name: PearlDrafter(parts.draft_model, hand_to=parts.device)}

    def close(self) -> None:
        """End the thread, once it is idle."""
        self._executor.shutdown(wait=self._work is None or self._work.done())

    def propose(self, sequences: Sequence[DecodingSequence]) -> list[Proposal]:
        """Propose as usual, without draft models that failed and whose samples have all been shown."""
        for sequence in sequences:
            for name, session in list(_ahead_of(sequence)):
                if session.failed and not session.at_hand:
                    self.aids.leave(sequence, name)
        return super().propose(sequences)

    def score(self, proposals: Sequence[Proposal]) -> Forward:
        """Score, while the draft models of these sequences draw.

        How many samples they make depends on time alone, never on a token that was sampled but not yet verified.
        """
        fence = self.aids.fences.of(AHEAD)
        drawings = [drawing for each in proposals if fence.is_on for drawing in self._drawings(each)]
        enough, started = threading.Event(), perf_counter()
        work = fence.run(lambda: self._executor.submit(_draw_in_turns, drawings, enough), None) if drawings else None
        if work is None:
            return super().score(proposals)
        self._work = work
        try:
            forward = super().score(proposals)
            for device in {rows.device for _, rows in forward.scored if rows.is_cuda}:
                torch.cuda.current_stream(device).synchronize()  # a GPU is still busy when its forward has returned
                forward.seconds = perf_counter() - started
            return forward
        finally:
            enough.set()
            ended = perf_counter()
            patience = min(self.aids.fences.deadline, max(LEAST_PATIENCE, PATIENCE * (ended - started)))
            if wait([work], timeout=patience).done:
                self._learn(drawings, (perf_counter() - ended) * 1e3)
            else:
                _abandon(drawings, work, self.aids)

    def rows(self, proposal: Proposal, logits: Tensor, hidden: Callable[[int], Tensor] | None) -> TargetRows:
        """Return the rows over the scored tree and the sample drawn since, which gets a made-up row.

        A lossy mode changes the target's distribution depending on the proposals, so it verifies only the scored tree.
        """
        rows, sequence = super().rows(proposal, logits, hidden), proposal.sequence
        return self.aids.fences.of(AHEAD).run(lambda: self._with_leaf(sequence, rows, logits, hidden), rows)

    def _with_leaf(
        self, sequence: DecodingSequence, rows: TargetRows, logits: Tensor, hidden: Callable[[int], Tensor] | None
    ) -> TargetRows:
        sequence.stats.extra["num_lookaheads"] += _num_at_hand(sequence) > 0
        request, tree, num_scored = sequence.request, rows.tree, len(rows.tree)
        for name, session in [] if verifier_of(request.mode).lossy else list(_ahead_of(sequence)):
            if session.at_hand:
                tree = self.aids.drafting(sequence, name, partial(session.extended, tree, num_scored), tree)
        if tree is rows.tree:
            return rows
        scored = set(rows.tree.candidates)
        new = [each for each in tree.candidates if each not in scored]
        for error in faults_of(new, tree, num_scored + len(sequence.drawing), request.num_tokens).values():
            raise error
        shape = request.shape
        if shape is not None:
            leaves = range(num_scored, len(tree))
            shape = _ExceptAfter(shape, {(*sequence.output_ids, *tree.tokens_to(leaf)) for leaf in leaves})
        all_logits = with_made_up_rows(logits, len(tree))
        return TargetRows(all_logits, tree, request.sampling, sequence.output_ids, shape, hidden)

    def commit(self, verified: Sequence[Verified]) -> list[Verified]:
        """Commit as usual, but drop the token after a leaf with a made-up row: the leaf's own token takes its place."""
        for each in verified:
            each.verdict = without_made_up(each.verdict, each.rows.tree, len(each.proposal.tree))
        return super().commit(verified)

    def accept(self, verified: Verified) -> Emission:
        """Accept as usual, and count the step if samples are still at hand: the committed text agrees with them."""
        result = super().accept(verified)
        stats = verified.sequence.stats
        stats.extra["num_lookaheads_used"] += _num_at_hand(verified.sequence) > 0
        return result

    def _drawings(self, proposal: Proposal) -> list[_Drawing]:
        """What a sequence's drafters may draw during the forward over its tree."""
        sequence = proposal.sequence
        if sequence.error is not None:
            return []
        drawings = (
            self.aids.drafting(sequence, source, partial(self._drawing, proposal, source, session), None)
            for source, session in list(_ahead_of(sequence))
            if not session.failed
        )
        return [drawing for drawing in drawings if drawing is not None]

    def _drawing(self, proposal: Proposal, source: str, session: PearlSession) -> _Drawing | None:
        sequence, behind, limits = proposal.sequence, session.behind, proposal.sequence.limits()
        decide = partial(self._planner.num_draws_ahead, source, behind, limits)
        room = limits.max_depth + 1 - proposal.plan.draws.get(source, 0)
        number = min(self.aids.planning(sequence, decide, 0), room) - session.at_hand
        return _Drawing(sequence, source, session, sequence.rng(), behind, number) if number > 0 else None

    def _learn(self, drawings: Sequence[_Drawing], waited: float) -> None:
        """Tell the planner what the draws cost, and for how many milliseconds the step `waited` for the last of them.

        A session that failed draws nothing more, but what it has drawn is verified: whether it failed may depend on it.
        """
        for drawing in drawings:
            sequence = drawing.sequence
            sequence.stats.draft_model_seconds += drawing.seconds
            if drawing.error is not None:
                self.aids.fences.of(drawing.source).fault(drawing.error)
                drawing.session.failed = True
            if drawing.made:
                observe = partial(self._planner.observe_draws, drawing.source, drawing.made, drawing.behind)
                self.aids.planning(sequence, partial(observe, drawing.seconds * 1e3), None)
        for source, last in {drawing.source: drawing for drawing in drawings}.items():
            behind = max(drawing.behind for drawing in drawings if drawing.source == source)
            self.aids.planning(last.sequence, partial(self._planner.observe_wait, source, behind, waited), None)

    @property
    def _planner(self) -> PearlPlanner:
        assert isinstance(self.aids.planner, PearlPlanner)
        return self.aids.planner


def with_made_up_rows(logits: Tensor, num_nodes: int) -> Tensor:
    """Append rows for the nodes that were not scored: `[num_nodes + 1, vocab_size]`.

    Any finite row will do, because the token that it gives is dropped.
    """
    made_up = logits.new_full((num_nodes + 1 - len(logits), logits.shape[1]), -1e4)
    made_up[:, 0] = 0.0
    return torch.cat((logits, made_up))


def without_made_up(verdict: Verdict, tree: CandidateTree, num_scored: int) -> Verdict:
    """Drop the token after a leaf that was not scored: the leaf's own token takes its place."""
    if not verdict.path or verdict.path[-1] < num_scored:
        return verdict
    return replace(verdict, path=verdict.path[:-1], next_token=tree.token_ids[verdict.path[-1]])


@dataclass(frozen=True, slots=True)
class _ExceptAfter:
    """A request's constraint, which leaves the rows after some texts as they are: those were made up."""

    shape: RowShaper
    texts: set[tuple[int, ...]]

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Shape one row."""
        return row if tuple(output_ids) in self.texts else self.shape(output_ids, row)


def _ahead_of(sequence: DecodingSequence) -> Iterator[tuple[str, PearlSession]]:
    for source, session in sequence.drawing.items():
        if isinstance(session, PearlSession):
            yield source, session


def _num_at_hand(sequence: DecodingSequence) -> int:
    return sum(session.at_hand for _, session in _ahead_of(sequence))


def _abandon(drawings: Sequence[_Drawing], work: Future[None], aids: Aids) -> None:
    """Continue without draft models that do not return; their sessions are still in use and are not touched again."""
    for drawing in drawings:
        drawing.sequence.sessions.pop(drawing.source, None)
    for source in {drawing.source for drawing in drawings}:
        aids.fences.of(source).hangs(work)


def _draw_in_turns(drawings: Sequence[_Drawing], enough: threading.Event) -> None:
    """Draw one token for each in turn, those with the fewest samples first, until `enough` is set or all are done."""
    order = sorted(drawings, key=lambda drawing: drawing.session.at_hand)
    while any(drawing.left for drawing in order):
        for drawing in order:
            if enough.is_set():
                return
            if drawing.left:
                drawing.draw_one()
