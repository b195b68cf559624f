"""PEARL: the draft model draws while the target scores, and the answer stays the target's own."""

from __future__ import annotations

import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent import judging
from precedent import pearl as pearl_module
from precedent.at_once import AtOnce
from precedent.background import Background
from precedent.config import SamplingParams, SpeculationConfig
from precedent.cost_curve import CostCurve
from precedent.decode import step
from precedent.drafters import draft_model
from precedent.drafters.base import Candidates, Drafter, DraftRequest
from precedent.drafters.draft_model import DraftModelDrafter
from precedent.drafters.lookahead import DraftedToken, Lookahead
from precedent.draw_gate import TRIAL_STEPS
from precedent.engine import Engine
from precedent.errors import ConfigError, GenerationError, RequestCancelled, UnsupportedError
from precedent.pearl import Pearl, pearl_for
from precedent.plan import Limits, Plan
from precedent.planner import Planner
from precedent.sampling import Coins, CounterCoins
from precedent.sequence import DecodingSequence, entropy_coins
from precedent.target import TargetModel
from precedent.target.first_layers import first_layers, layers_of
from precedent.target.host_waits import HostWaits
from precedent.target.loading import load_draft
from precedent.target_rows import TargetRows
from precedent.testing.drafters import OracleDrafter, RandomDrafter
from precedent.testing.enumeration import CoinsOfAStep, enumerate_outcomes
from precedent.testing.random_trees import toy_model
from precedent.testing.tabled_model import TabledModel
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent.tree import ROOT, CandidateTree, Drawn, Point, TreeBuilder
from precedent.unscored import RowsSoFar, judged
from precedent.verify import verify
from precedent.verify.ahead import Scored, VerdictsAhead, computed_alike, read_together

PROMPT = (11, 7, 200, 31, 5, 7)
ENTROPY = entropy_coins(1)
END = 0
EXACT = 1e-12


class FlatCost(CostCurve):
    """Every width costs the same, whatever the clock says."""

    def observe(self, width: int, milliseconds: float) -> None:
        """Nothing is learned."""


class PlannerOfAllPoints(Planner):
    """Verifies every candidate and everything at hand, without a clock in its decisions."""

    def __init__(self, most_ahead: int = 3) -> None:
        super().__init__(CostCurve())
        self._most_ahead = most_ahead

    def plan(self, candidates: Sequence, behind: Mapping[str, int], limits: Limits) -> Plan:
        """All candidates within the limits, and as many draws as are at hand."""
        self.cost.table[:] = 1.0  # whatever was measured: width is free
        plan = super().plan(candidates, {}, limits)
        plan.draws = {source: min(number, limits.max_depth) for source, number in limits.at_hand.items()}
        return plan

    def num_draws_ahead(self, source: str, behind: int, limits: Limits) -> int:
        """Always the same number."""
        return self._most_ahead


def start(
    target: TargetModel | TabledModel,
    drafters: Sequence[Drafter],
    sampling: SamplingParams,
    *,
    coins_of: Callable[[int], Coins] = ENTROPY,
    prompt: Sequence[int] = PROMPT,
    mode: str = "",
    ends: frozenset[int] = frozenset({END}),
) -> DecodingSequence:
    """A prefilled sequence whose drafters draft ahead where they can."""
    slot = target.new_slot()
    target.prefill(slot, prompt)
    mode = mode or ("greedy" if sampling.greedy else "coupled" if sampling.seed is not None else "traversal")
    request = DraftRequest("test", tuple(prompt), sampling, mode=mode, end_token_ids=ends)
    sequence = DecodingSequence(
        slot=slot,  # type: ignore[arg-type]  # a table's slots are shaped like a model's
        sampling=sampling,
        speculation=SpeculationConfig(),
        mode=mode,
        coins_of=coins_of,
        end_token_ids=ends,
        max_tokens=sampling.max_tokens,
        draftings={drafter.name: drafter.begin(request) for drafter in drafters},
        draw_sources=tuple(drafter.name for drafter in drafters if drafter.draws),
    )
    sequence.draft_ahead()
    return sequence


def run(
    target: TargetModel | TabledModel,
    sequence: DecodingSequence,
    pearl: Pearl | None,
    planner: Planner | None = None,
) -> tuple[int, ...]:
    """Step to the end and return the output."""
    planner = planner or PlannerOfAllPoints()
    while not sequence.finished:
        step([sequence], target, planner, pearl)  # type: ignore[arg-type]
    if sequence.error is not None:
        raise sequence.error
    return tuple(sequence.output_ids)


def in_place() -> Pearl:
    """Draws before the forward, on the same thread: nothing hangs on time."""
    return Pearl(AtOnce())


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """A tiny float64 Llama."""
    return TargetModel(tiny_causal_lm("llama", seed=5))


@pytest.fixture(params=["in place", "on a thread"])
def pearl(request: pytest.FixtureRequest):
    """Both ways to draw ahead."""
    pearl = in_place() if request.param == "in place" else Pearl()
    yield pearl
    pearl.close()


def good_draft() -> DraftModelDrafter:
    """A draft model that is the target over again."""
    return DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=5)))


def bad_draft() -> DraftModelDrafter:
    """A draft model that knows nothing."""
    return DraftModelDrafter(TargetModel(tiny_causal_lm("llama", seed=6, num_hidden_layers=1)))


# Texts that are functions of the target alone


CHOSEN_TEXTS = {
    "greedy": SamplingParams(max_tokens=30),
    "coupled": SamplingParams(temperature=0.9, seed=4, max_tokens=30),
}


@pytest.mark.parametrize("read_at_once", [False, True], ids=["", "read at once"])
@pytest.mark.parametrize("sampling", CHOSEN_TEXTS.values(), ids=CHOSEN_TEXTS)
def test_chosen_texts_are_those_of_plain_decoding(
    target: TargetModel, pearl: Pearl, sampling: SamplingParams, read_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, and with a seed: a helpful draft model, a useless one, memory and nonsense beside them change nothing."""
    plain = run(target, start(target, [], sampling), None)
    monkeypatch.setattr(judging, "on_accelerator", lambda logits: read_at_once)
    oracle, adversary = OracleDrafter(plain), RandomDrafter(target.vocab_size)
    for others in ([], [oracle], [adversary], [oracle, adversary]):
        for draft in (good_draft(), bad_draft()):
            assert run(target, start(target, [*others, draft], sampling), pearl) == plain


def test_a_draft_model_that_agrees_is_never_waited_for_and_always_used(target: TargetModel) -> None:
    """The first step judges one draw by the row it has anyway; each later one begins with the three behind it."""
    sampling = SamplingParams(max_tokens=25)
    plain = run(target, start(target, [], sampling), None)
    sequence = start(target, [good_draft()], sampling)
    assert run(target, sequence, in_place(), PlannerOfAllPoints(most_ahead=4)) == plain
    stats = sequence.stats
    assert stats.num_steps == 7  # 1 token, then 4 each: three at hand, and the next one judged at once
    assert stats.accepted_by_source == {"draft-model": 25}
    assert stats.num_lookaheads == 7
    assert stats.num_lookaheads_used == 6  # after the last step the answer is over
    assert stats.as_dict()["num_lookaheads_used"] == 6


def test_a_draft_model_that_errs_is_forgotten_after_each_error(target: TargetModel) -> None:
    """Every lookahead is dropped, and every step costs what a plain one costs: one token, one row."""
    sampling = SamplingParams(max_tokens=20)
    plain = run(target, start(target, [], sampling), None)
    sequence = start(target, [AlwaysWrong(plain)], sampling)
    assert run(target, sequence, in_place()) == plain
    assert sequence.stats.num_steps == sequence.stats.num_lookaheads == 20
    assert sequence.stats.num_lookaheads_used == sequence.stats.num_accepted_tokens == 0
    assert sequence.stats.num_draft_tokens == 20  # the one that is judged at once


class AlwaysWrong:
    """Drafts ahead, never what the target says."""

    name, draws = "wrong", True

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def begin(self, request: DraftRequest) -> WrongDrafting:
        return WrongDrafting(self._answer)

    def close(self) -> None:
        """Nothing is held."""


class WrongDrafting:
    behind = 0

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer, self._done, self._ahead = answer, 0, Lookahead()

    @property
    def at_hand(self) -> int:
        return self._ahead.unseen

    def match(self, budget: int) -> Candidates:
        return Candidates("wrong")

    def draw(self, builder: TreeBuilder, num_draws: int, coins: Coins) -> None:
        assert num_draws == 0

    def draw_ahead(self, coins: Coins) -> bool:
        self._ahead.chain.append(DraftedToken((self._answer[self._done] + 1) % 250 + 1, Point()))
        return True

    def hung_below(self, tree: CandidateTree) -> CandidateTree:
        return self._ahead.hung_below(tree, "wrong", lambda drafted: drafted)

    def committed(self, token_ids: Sequence[int]) -> None:
        self._done = min(self._done + len(token_ids), len(self._answer) - 1)
        self._ahead.settle(token_ids)

    def end(self) -> None:
        """Nothing is held."""


# The law when sampling


def toy(name: str) -> TabledModel:
    """A random model of two tokens, behind a prompt of one."""
    law = toy_model(name, 2, plain=True)
    return TabledModel(lambda token_ids: law(token_ids[1:]).log())


def toy_draft(name: str = "draft") -> Drafter:
    return DraftModelDrafter(toy(name))  # type: ignore[arg-type]  # shaped like a TargetModel


def answer_law(
    drafters: Callable[[], Sequence[Drafter]],
    mode: str,
    *,
    length: int,
    most_ahead: int,
    target_name: str = "target",
    ends: frozenset[int] = frozenset(),
    planner: type[PlannerOfAllPoints] = PlannerOfAllPoints,
) -> dict[tuple[int, ...], float]:
    """The exact law of whole answers through the real loop: every branch of the coins of drafting and verifying."""
    target, law = toy(target_name), defaultdict(float)

    def answer(coins: Coins) -> tuple[int, ...]:
        sequence = start(
            target, drafters(), SamplingParams(temperature=1.0, max_tokens=length), prompt=(0,), mode=mode,
            coins_of=lambda number: CoinsOfAStep(coins, number), ends=ends,
        )  # fmt: skip
        return run(target, sequence, Pearl(AtOnce()), planner(most_ahead))

    with torch.inference_mode():
        for probability, output in enumerate_outcomes(answer):
            law[output] += probability
    return law


def target_law(length: int, name: str = "target") -> dict[tuple[int, ...], float]:
    law, expected = toy_model(name, 2, plain=True), {}
    for string in itertools.product(range(2), repeat=length):
        expected[string] = 1.0
        for place, token in enumerate(string):
            expected[string] *= float(law(string[:place])[token])
    return expected


def until_the_end(law: Mapping[tuple[int, ...], float], end: int) -> dict[tuple[int, ...], float]:
    """The same law of answers that stop at their first end token."""
    cut: dict[tuple[int, ...], float] = defaultdict(float)
    for string, mass in law.items():
        cut[string[: string.index(end) + 1] if end in string else string] += mass
    return cut


def distance(law: Mapping[tuple[int, ...], float], expected: Mapping[tuple[int, ...], float]) -> float:
    return 0.5 * sum(abs(law.get(string, 0.0) - mass) for string, mass in expected.items())


MEMORY = {"alone": (), "beside a path": (1, 0, 1, 1), "beside another": (0, 0, 1, 0)}


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("mode", ["traversal", "topdown", "topdown:plan=k-seq", "traversal:plan=transport"])
def test_whole_answers_have_the_targets_law_exactly(mode: str, memory: tuple[int, ...]) -> None:
    """All answers of three tokens, over every branch: lookaheads used, dropped and met by memory's points."""

    def drafters() -> list[Drafter]:
        return [OracleDrafter(memory), toy_draft()]

    law = answer_law(drafters, mode, length=3, most_ahead=2)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(law, target_law(3)) < EXACT


def test_four_tokens_and_a_longer_lookahead_keep_the_law() -> None:
    """Draws that stand for more than one step, and lazy coins that reject a subtree whose token comes back."""
    law = answer_law(lambda: [toy_draft()], "traversal", length=4, most_ahead=3)
    assert distance(law, target_law(4)) < EXACT


class PlannerThatPeeks(PlannerOfAllPoints):
    """The tempting mistake: a lookahead is shown whole where it has come to an end, and kept back where it has not."""

    def plan(self, candidates: Sequence, behind: Mapping[str, int], limits: Limits) -> Plan:
        plan = super().plan(candidates, behind, limits)
        plan.draws = {source: number * (number < self._most_ahead - 1) for source, number in plan.draws.items()}
        return plan


@pytest.mark.parametrize(("planner", "exact"), [(PlannerOfAllPoints, True), (PlannerThatPeeks, False)])
def test_answers_that_end_have_the_law_if_nobody_peeks(planner: type[PlannerOfAllPoints], exact: bool) -> None:
    """How many draws are at hand tells whether an end token is among them: what is shown must not hang on that."""
    law = answer_law(
        lambda: [toy_draft("draft 4")], "traversal", length=5, most_ahead=4,
        target_name="target 4", ends=frozenset({1}), planner=planner,
    )  # fmt: skip
    found = distance(law, until_the_end(target_law(5, "target 4"), 1))
    assert (found < EXACT) if exact else (found > 1e-2)


class KeepsOnlyTheLikely(Lookahead):
    """The tempting mistake: an unseen draw is forgotten because of what it is, and another one is made in its place."""

    __slots__ = ()

    def settle(self, token_ids: Sequence[int]) -> None:
        super().settle(token_ids)
        chances = [float(drafted.law.probs()[drafted.token_id]) for drafted in self.chain]
        self.chain = list(itertools.takewhile(lambda _: chances.pop(0) > 0.5, self.chain))


def test_a_lookahead_that_is_dropped_for_what_it_holds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same enumeration finds the bias of showing likely draws only."""
    monkeypatch.setattr(draft_model, "Lookahead", KeepsOnlyTheLikely)
    law = answer_law(lambda: [toy_draft()], "traversal", length=3, most_ahead=2)
    assert distance(law, target_law(3)) > 1e-3


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_the_verifier_for_gpus_judges_unscored_leaves_alike(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights at once, a row of nothing behind each leaf: the same law."""
    monkeypatch.setattr(judging, "verify", lambda *given, batched: verify(*given, batched=True))

    def drafters() -> list[Drafter]:
        return [OracleDrafter((1, 0, 1, 1)), toy_draft()]

    law = answer_law(drafters, mode, length=3, most_ahead=2)
    assert distance(law, target_law(3)) < EXACT


def tree_of(number: int, num_draws: int) -> CandidateTree:
    """A point and a chain of draws; with one draw more it is the same tree and a leaf."""
    generator, builder, node = torch.Generator().manual_seed(number), TreeBuilder(), ROOT
    builder.add_point(ROOT, 1, "cache")
    for _ in range(num_draws):
        law = Drawn(torch.rand(5, generator=generator).softmax(0), builder.children(node))
        node = builder.add_draw(node, int(torch.multinomial(law.probs(), 1, generator=generator)), law, "draft")
    return builder.build()


@pytest.mark.parametrize("mode", ["traversal", "topdown", "greedy", "coupled"])
def test_unscored_leaves_are_judged_with_one_read(mode: str) -> None:
    """Together with the tree of another sequence, and to the verdict that the same coins come to row by row."""
    params, used = SamplingParams(temperature=0.0 if mode == "greedy" else 0.8, seed=2), 0
    for number in range(150):
        tree, whole = tree_of(number, 1), tree_of(number, 2)
        logits = torch.randn(len(tree) + 1, 5, generator=torch.Generator().manual_seed(number)).mul(0.3)
        rows = TargetRows(logits, tree, params, at_once=True)
        scored = [
            Scored(whole, RowsSoFar(rows, len(tree), len(whole)), CounterCoins(3, number), mode),
            Scored(tree, TargetRows(logits, tree, params, at_once=True), CounterCoins(4, number), mode),
        ]
        with torch.inference_mode(), HostWaits() as waits:
            read_together([VerdictsAhead(together) for together in computed_alike(scored)])
            verdicts = [each.verdict() for each in scored]
        assert waits.names == ["resolve_neg"], "one list is read"
        by_row = TargetRows(logits, tree, params)
        expected = verify(whole, RowsSoFar(by_row, len(tree), len(whole)), mode, CounterCoins(3, number))
        assert judged(whole, len(tree), verdicts[0]) == judged(whole, len(tree), expected)
        assert verdicts[1] == verify(tree, by_row, mode, CounterCoins(4, number))
        used += verdicts[0].path[-1:] == (len(tree),)
    assert used > 0


# How many


def limits_with(at_hand: int) -> Limits:
    return Limits(0, 6, 40, frozenset(), at_hand={"draft-model": at_hand})


@pytest.mark.parametrize(("acceptance", "milliseconds"), [(0.9, 0.0), (0.5, 0.2), (0.7, 4.0)])
def test_what_is_shown_is_the_best_number_as_far_as_it_is_there(acceptance: float, milliseconds: float) -> None:
    """Never another number because fewer are at hand; and what draws cost when they were made does not count."""
    planner = planner_that_knows(acceptance, milliseconds)
    shown = [planner.plan([], {"draft-model": 1}, limits_with(ready)).draws["draft-model"] for ready in range(1, 9)]
    assert shown == [min(shown[-1], ready) for ready in range(1, 9)]
    assert shown[-1] > 0


def planner_that_knows(acceptance: float, milliseconds: float) -> Planner:
    """Forwards take 10 milliseconds and a twentieth more per row; a draw is known to take so long."""
    planner = Planner(FlatCost())
    planner.cost.table[:] = 10.0 + 0.5 * torch.arange(len(planner.cost.table)).numpy()
    for depth in range(1, 7):
        for number in range(1000):
            planner.calibration.observe("draft-model", depth, number * 0.618034 % 1.0 < acceptance)
    planner.observe_draws("draft-model", 1, 1, milliseconds)
    return planner


def test_a_cheap_draft_is_waited_for_and_a_dear_one_is_not() -> None:
    """With nothing at hand; a draft model that has its prompt to read yet is never waited for."""
    for milliseconds, waits in ((0.1, True), (4.0, False)):
        planner = planner_that_knows(0.8, milliseconds)
        assert bool(planner.plan([], {"draft-model": 1}, limits_with(0)).draws["draft-model"]) == waits
        assert planner.plan([], {"draft-model": 400}, limits_with(0)).draws["draft-model"] == 0


def simulated_rate(acceptance: float, number: int, milliseconds: float, *, waits: bool) -> float:
    """Tokens per millisecond of one way to go on when nothing is at hand, by throwing coins."""
    choose, tokens, time, ready = random.Random(0), 0, 0.0, False
    for _ in range(60_000):
        shown = number if ready or waits else 0
        time += 10.0 + 0.5 * shown + (0.0 if ready else milliseconds * shown)
        accepted = next((i for i in range(shown + 1) if choose.random() >= acceptance), shown + 1)
        tokens, ready = tokens + min(accepted, shown) + 1, accepted == shown + 1
    return tokens / time


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
@pytest.mark.parametrize("milliseconds", [0.2, 0.8, 1.6, 3.0])
def test_waiting_or_not_is_decided_as_a_simulation_decides(acceptance: float, milliseconds: float) -> None:
    """The closed form against coins, where the two ways differ by more than the coins' noise."""
    planner = planner_that_knows(acceptance, milliseconds)
    waiting, beside = (simulated_rate(acceptance, 4, milliseconds, waits=waits) for waits in (True, False))
    if abs(waiting / beside - 1.0) > 0.02:
        assert planner._beats_pre_verify("draft-model", 4, 1, 4 * milliseconds) == (waiting > beside)


def test_a_draft_model_that_is_waited_for_in_vain_is_left_alone() -> None:
    """After its trial; one whose draws stand is not, if the waits are short."""
    for acceptance, waited, goes_on in ((0.01, 5.0, False), (0.8, 0.5, True)):
        planner = planner_that_knows(acceptance, 1.0)
        for _ in range(TRIAL_STEPS):
            assert planner.num_draws_ahead("draft-model", 1, limits_with(0)) == 7
            planner.observe_draws_ahead("draft-model", 1, waited)
        assert bool(planner.num_draws_ahead("draft-model", 1, limits_with(0))) == goes_on
    assert planner.num_draws_ahead("draft-model", 1, Limits(8, 0, 40, frozenset())) == 0


# What is left behind


class Watched(WrongDrafting):
    """Draws when it is told to, and knows whether it is at it."""

    def __init__(self, answer: Sequence[int], before: Callable[[], object]) -> None:
        super().__init__(answer)
        self.made, self.at_it, self._before = 0, False, before

    def draw_ahead(self, coins: Coins) -> bool:
        self.at_it = True
        self._before()
        self.made, self.at_it = self.made + 1, False
        return super().draw_ahead(coins)


def watched(target: TargetModel, before: Callable[[], object]) -> tuple[DecodingSequence, Watched]:
    sequence = start(target, [AlwaysWrong([1] * 400)], SamplingParams(max_tokens=400))
    drafting = sequence.draftings["wrong"] = Watched([1] * 400, before)
    sequence.draft_ahead()
    return sequence, drafting


def test_drawing_ends_with_the_forward(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many draws as the target leaves time for, not as many as there is room for."""
    allowed = threading.Semaphore(0)
    sequence, drafting = watched(target, lambda: allowed.acquire(timeout=5.0))
    scored = target.score

    def score(batch: Sequence) -> list[Tensor]:
        allowed.release(2)
        while drafting.made < 2:
            threading.Event().wait(0.001)
        rows = scored(batch)
        allowed.release()  # for the draw that was begun meanwhile
        return rows

    monkeypatch.setattr(target, "score", score)
    pearl = Pearl()
    step([sequence], target, PlannerOfAllPoints(most_ahead=300), pearl)
    pearl.close()
    assert 2 <= drafting.made <= 4
    assert not drafting.at_it


def test_a_forward_that_fails_leaves_no_draft_model_at_work(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step returns when the draw that was begun has ended, and the error is the request's own."""
    begun, allowed = threading.Event(), threading.Event()
    sequence, drafting = watched(target, lambda: begun.set() or allowed.wait(5.0))

    def score(batch: Sequence) -> list[Tensor]:
        begun.wait(5.0)
        threading.Timer(0.05, allowed.set).start()
        raise RuntimeError("the target is ill")

    monkeypatch.setattr(target, "score", score)
    pearl = Pearl()
    step([sequence], target, PlannerOfAllPoints(most_ahead=300), pearl)
    pearl.close()
    assert isinstance(sequence.error, GenerationError)
    assert "the target is ill" in str(sequence.error)
    assert drafting.made >= 1
    assert not drafting.at_it


def test_a_draft_model_that_fails_ahead_fails_its_own_request_alone(target: TargetModel, pearl: Pearl) -> None:
    """Its neighbour's answer is the plain one."""
    sampling = SamplingParams(max_tokens=12)
    plain = run(target, start(target, [], sampling), None)

    def ill() -> None:
        raise RuntimeError("the draft model is ill")

    failing, _ = watched(target, ill)
    healthy = start(target, [good_draft()], sampling)
    running, planner = [failing, healthy], PlannerOfAllPoints()
    while not healthy.finished:
        step(running, target, planner, pearl)
        running = [healthy] if failing.error else running
    assert "drafting ahead: the draft model is ill" in str(failing.error)
    assert tuple(healthy.output_ids) == plain


# The engine


PROMPT_OF_ENGINE = tuple(range(40, 70))


@contextmanager
def engine_on(model: PreTrainedModel, draft: PreTrainedModel | None, **settings: object) -> Iterator[Engine]:
    engine = Engine(
        model, byte_tokenizer(), name="tiny", draft_model=draft, cost=FlatCost(),
        speculation=SpeculationConfig(drafters=("draft-model",)), **settings,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("sampling", CHOSEN_TEXTS.values(), ids=CHOSEN_TEXTS)
def test_an_engine_answers_as_without(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests at once, on the thread and in place; the draft model takes part, its steps are counted."""
    model, draft = (tiny_causal_lm(scale=2.0, num_hidden_layers=layers) for layers in (3, 3))
    with engine_on(model, None) as engine:
        plain = engine.submit(PROMPT_OF_ENGINE, sampling).result().token_ids
    for executor in (Background, lambda *_: AtOnce()):
        monkeypatch.setattr(pearl_module, "Background", executor)
        with engine_on(model, draft, pearl=True) as engine:
            asked = [engine.submit(PROMPT_OF_ENGINE, sampling) for _ in range(3)]
            results = [generation.result() for generation in asked]
        assert [result.token_ids for result in results] == [plain] * 3
    assert all(result.stats.num_lookaheads_used > 0 for result in results)  # in place: whatever the clock says
    assert all(result.stats.accepted_by_source["draft-model"] > 0 for result in results)


def test_a_cancelled_request_leaves_an_engine_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in the middle of an answer, while the draft model is ahead; the next one is the plain one."""
    model, draft = tiny_causal_lm(scale=2.0), tiny_causal_lm(scale=2.0)
    long, short = SamplingParams(max_tokens=400), SamplingParams(max_tokens=24)
    with engine_on(model, None) as engine:
        plain = engine.submit(PROMPT_OF_ENGINE, short).result().token_ids
    with engine_on(model, draft, pearl=True) as engine:
        generation = engine.submit(PROMPT_OF_ENGINE, long)
        for _ in generation:
            break
        with pytest.raises(RequestCancelled):
            generation.result()
        assert engine.submit(PROMPT_OF_ENGINE, short).result().token_ids == plain
        kept = engine._drafters["draft-model"]._pool  # type: ignore[attr-defined]
        assert len(kept._idle) == 1  # the second request went on where the first one was left


def test_the_thread_ends_with_the_engine() -> None:
    """And memory is set aside for what is drawn ahead."""
    model, draft = tiny_causal_lm(), tiny_causal_lm(num_hidden_layers=1)
    reserved = []
    for pearl in (False, True):
        with engine_on(model, draft, pearl=pearl) as engine:
            engine.submit(PROMPT_OF_ENGINE, SamplingParams(max_tokens=4)).result()
            drafters = engine._drafters_named(("draft-model",))
            reserved.append(engine._kv_bytes(200, 16, engine.speculation, drafters))
            named = [thread for thread in threading.enumerate() if thread.name.startswith("precedent-draft")]
            assert bool(named) == pearl
        assert not any(thread.is_alive() for thread in named)
    assert reserved[1] >= reserved[0]


# Who drafts ahead, and where


def on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device))


def test_by_default_only_a_draft_model_elsewhere_drafts_ahead() -> None:
    """On one device it is asked for by name."""
    here, there = on("cpu"), on("meta")
    for draft, wanted, expected in (
        (there, None, True), (here, None, False), (here, True, True), (there, False, False), (None, None, False),
    ):  # fmt: skip
        pearl = pearl_for(draft, here, wanted, early_exit=False)  # type: ignore[arg-type]
        assert (pearl is not None) == expected
    assert pearl_for(there, here, None, early_exit=True) is None  # type: ignore[arg-type]


def test_what_cannot_draft_ahead_is_refused_by_name() -> None:
    """No draft model, one that shares the target's keys and values, a device for nothing, an object, a toaster."""
    model, tokenizer = tiny_causal_lm(), byte_tokenizer()
    with pytest.raises(ConfigError, match="give draft_model="):
        Engine(model, tokenizer, name="tiny", pearl=True, cost=FlatCost())
    with pytest.raises(UnsupportedError, match="first-layers"):
        Engine(model, tokenizer, name="tiny", draft_model=first_layers(model, 1), pearl=True, cost=FlatCost())
    with pytest.raises(ConfigError, match="draft_device='cpu' is for a draft model"):
        Engine.load(model, tokenizer=tokenizer, draft_device="cpu")
    with pytest.raises(ConfigError, match="move it there"):
        Engine.load(model, tokenizer=tokenizer, draft_model=tiny_causal_lm(), draft_device="cpu")
    with pytest.raises(ConfigError, match="draft_device='toaster'"):
        load_draft("first-layers:1", model, tokenizer, device="toaster")


def test_what_a_draft_shares_with_its_target_is_copied_to_another_device() -> None:
    """The target stays where it is."""
    model = tiny_causal_lm()
    beside = load_draft("first-layers:2", model, byte_tokenizer(), device="cpu")
    elsewhere = load_draft("first-layers:2", model, byte_tokenizer(), device="meta")
    assert layers_of(beside)[0] is layers_of(model)[0]
    assert {parameter.device.type for parameter in elsewhere.parameters()} == {"meta"}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_laws_are_handed_on_to_where_the_target_verifies() -> None:
    """The row moves, what was excluded stays."""
    drafter = DraftModelDrafter(TargetModel(tiny_causal_lm()), laws_on=torch.device("meta"))
    law = drafter.handed_on(Drawn(torch.tensor([0.5, 0.5]), (1,)))
    assert (law.row.device.type, law.excluded) == ("meta", (1,))


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["the same GPU", "a CPU"])
def test_two_streams_on_a_gpu_answer_as_one(place: str) -> None:
    """Draft and target on one GPU by turns and at once, or apart: in float64 the texts are those of plain decoding."""
    texts, seeded = [], SamplingParams(temperature=0.9, seed=4, max_tokens=64)
    for pearl in (False, True):
        model = tiny_causal_lm(scale=2.0).to("cuda")
        draft = tiny_causal_lm(scale=2.0).to("cpu" if place == "a CPU" else "cuda")
        with engine_on(model, draft, pearl=pearl) as engine:
            for sampling in (SamplingParams(max_tokens=64), seeded):
                asked = [engine.submit((*PROMPT_OF_ENGINE, last), sampling) for last in range(4)]
                texts.append([generation.result().token_ids for generation in asked])
            if pearl:
                sampled = SamplingParams(temperature=0.9, max_tokens=64)
                results = [engine.submit(PROMPT_OF_ENGINE, sampled).result() for _ in range(4)]
                assert all(len(result.token_ids) == 64 for result in results)
                assert sum(result.stats.accepted_by_source["draft-model"] for result in results) > 0
    assert texts[:2] == texts[2:]
