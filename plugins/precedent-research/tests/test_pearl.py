"""PEARL: the draft model draws while the target scores, and the answer stays the target's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.pearl import CHOSEN_TEXTS, PlannerOfAllCandidates, in_place, run, start
from helpers.prefilled import as_on_a_gpu
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters import Request
from precedent.drafters.model.distribution import DraftedToken
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, GenerationError, RequestCancelled, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.planning.gate import PROBE_STEPS
from precedent.planning.planner import Limits
from precedent.runtime.background import AtOnce, Background
from precedent.runtime.fence import Fences
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers, layers_of
from precedent.target.load.loading import load_draft
from precedent.tree import Fixed
from precedent_research import pearl as pearl_module
from precedent_research.pearl import PearlDrafter, PearlLoop, PearlPlanner, PearlSession, PearlSource
from precedent_testing.drafters import OracleDrafter, RandomDrafter
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """A tiny float64 Llama."""
    return TargetModel(tiny_causal_lm("llama", seed=5))


in_place_and_on_a_thread = pytest.mark.parametrize("executor", [AtOnce(), None], ids=["in place", "on a thread"])


@pytest.fixture(params=["in place", "on a thread"])
def pearl(request: pytest.FixtureRequest, target: TargetModel):
    """Both ways to draw ahead."""
    pearl = in_place(target) if request.param == "in place" else PearlLoop(target, PlannerOfAllCandidates())
    yield pearl
    pearl.close()


def good_draft() -> PearlDrafter:
    """A draft model that is the target over again."""
    return PearlDrafter(TargetModel(tiny_causal_lm("llama", seed=5)))


def bad_draft() -> PearlDrafter:
    """A draft model that knows nothing."""
    return PearlDrafter(TargetModel(tiny_causal_lm("llama", seed=6, num_hidden_layers=1)))


# Texts that are functions of the target alone


@pytest.mark.parametrize("read_at_once", [False, True], ids=["", "read at once"])
@pytest.mark.parametrize("sampling", CHOSEN_TEXTS.values(), ids=CHOSEN_TEXTS)
@pytest.mark.sampled(3)
def test_chosen_texts_are_those_of_plain_decoding(
    target: TargetModel, pearl: PearlLoop, sampling: SamplingParams, read_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, and with a seed: a helpful draft model, a useless one, memory and nonsense beside them change nothing."""
    plain = run(target, start(target, [], sampling))
    if read_at_once:
        as_on_a_gpu(monkeypatch)
    oracle, adversary = OracleDrafter(plain), RandomDrafter(target.vocab_size)
    for others in ([], [oracle], [adversary], [oracle, adversary]):
        for draft in (good_draft(), bad_draft()):
            assert run(target, start(target, [*others, draft], sampling), pearl) == plain


def test_a_draft_model_that_agrees_is_never_waited_for_and_always_used(target: TargetModel) -> None:
    """The first step verifies one sample by the row it has anyway; each later one begins with the three behind it."""
    sampling = SamplingParams(max_tokens=25)
    plain = run(target, start(target, [], sampling))
    sequence = start(target, [good_draft()], sampling)
    assert run(target, sequence, in_place(target, PlannerOfAllCandidates(most_ahead=4))) == plain
    stats = sequence.stats
    assert stats.num_steps == 7  # 1 token, then 4 each: three at hand, and the next one verified at once
    assert stats.accepted_by_source == {"draft-model": 25}
    assert stats.extra["num_lookaheads"] == 7
    assert stats.extra["num_lookaheads_used"] == 6  # after the last step the answer is over
    assert stats.as_dict()["num_lookaheads_used"] == 6


def test_a_draft_model_that_errs_is_forgotten_after_each_error(target: TargetModel) -> None:
    """Every lookahead is dropped, and every step costs what a plain one costs: one token, one row."""
    sampling = SamplingParams(max_tokens=20)
    plain = run(target, start(target, [], sampling))
    sequence = start(target, [AlwaysWrong(plain)], sampling)
    assert run(target, sequence, in_place(target)) == plain
    assert sequence.stats.num_steps == sequence.stats.extra["num_lookaheads"] == 20
    assert sequence.stats.extra["num_lookaheads_used"] == sequence.stats.num_accepted_tokens == 0
    assert sequence.stats.num_draft_tokens == 20  # the one that is verified at once


def test_a_lossy_mode_shows_samples_at_hand_and_verifies_none_without_a_row(target: TargetModel) -> None:
    """Its rule sees what is proposed below a node before the target's row is used: nothing may be added later."""
    sequence = start(target, [good_draft()], SamplingParams(temperature=1.0, max_tokens=20), mode="lossy_typical")
    run(target, sequence, in_place(target))
    stats = sequence.stats
    assert stats.extra["num_lookaheads"] >= stats.extra["num_lookaheads_used"] > 0
    assert stats.extra["num_lookaheads"] == stats.num_steps
    assert stats.num_draft_tokens <= 3 * stats.num_steps, "three at hand, and no leaf more"


class AlwaysWrong(PearlDrafter):
    """Draws ahead, never what the target says; calls `before` at each sample."""

    def __init__(self, answer: Sequence[int], before: Callable[[], object] = lambda: None) -> None:
        super().__init__(TargetModel(tiny_causal_lm("llama", seed=6, num_hidden_layers=1)))
        self.name, self.answer, self.before = "wrong", answer, before

    def session(self, request: Request, context: list[int], place: Any) -> PearlSession:
        return WrongSession(self, request, context, place)


class WrongSession(PearlSession):
    """Knows how many samples it made, and whether it is at it."""

    made, at_it = 0, False

    def draw_ahead(self, rng: Rng) -> bool:
        drafter: Any = self.drafter
        self.at_it = True
        drafter.before()
        self.made, self.at_it = self.made + 1, False
        place = min(self.output_length, len(drafter.answer) - 1)
        self.chain.append(DraftedToken((drafter.answer[place] + 1) % 250 + 1, Fixed()))
        return True


# What is left behind


def watched(target: TargetModel, before: Callable[[], object]) -> tuple[DecodingSequence, Any]:
    sequence = start(target, [AlwaysWrong([1] * 400, before)], SamplingParams(max_tokens=400))
    return sequence, sequence.sessions["wrong"]


def test_drawing_ends_with_the_forward(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many samples as the target leaves time for, not as many as there is room for."""
    allowed = threading.Semaphore(0)
    sequence, session = watched(target, lambda: allowed.acquire(timeout=5.0))
    scored = target.score

    def score(batch: Sequence) -> list[Tensor]:
        allowed.release(2)
        while session.made < 2:
            threading.Event().wait(0.001)
        rows = scored(batch)
        allowed.release()  # for the one that was begun meanwhile
        return rows

    monkeypatch.setattr(target, "score", score)
    pearl = PearlLoop(target, PlannerOfAllCandidates(most_ahead=300))
    pearl.step([sequence])
    pearl.close()
    assert 2 <= session.made <= 4
    assert not session.at_it


def test_a_forward_that_fails_leaves_no_draft_model_at_work(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step returns when the sample that was begun is there, and the error is the request's own."""
    begun, allowed = threading.Event(), threading.Event()
    sequence, session = watched(target, lambda: begun.set() or allowed.wait(5.0))

    def score(batch: Sequence) -> list[Tensor]:
        begun.wait(5.0)
        threading.Timer(0.05, allowed.set).start()
        raise RuntimeError("the target is ill")

    monkeypatch.setattr(target, "score", score)
    pearl = PearlLoop(target, PlannerOfAllCandidates(most_ahead=300))
    pearl.step([sequence])
    pearl.close()
    assert isinstance(sequence.error, GenerationError)
    assert "the target is ill" in str(sequence.error)
    assert session.made >= 1
    assert not session.at_it


@in_place_and_on_a_thread
def test_a_draft_model_that_fails_ahead_fails_nobody(
    target: TargetModel, executor: AtOnce | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request goes on without it; both answers are the plain ones."""
    sampling, begun = SamplingParams(max_tokens=12), threading.Event()
    plain, score = run(target, start(target, [], sampling)), target.score

    def ill() -> None:
        begun.set()
        raise RuntimeError("the draft model is ill")

    monkeypatch.setattr(target, "score", lambda batch: score(batch) if begun.wait(60.0) else None)

    failing, healthy = start(target, [AlwaysWrong([1] * 400, ill)], sampling), start(target, [good_draft()], sampling)
    pearl = PearlLoop(target, PlannerOfAllCandidates(), fences := Fences(), executor)
    while running := [sequence for sequence in (failing, healthy) if not sequence.finished]:
        pearl.step(running)
    pearl.close()
    assert tuple(failing.output_ids) == tuple(healthy.output_ids) == plain
    assert "wrong" not in failing.sessions
    assert fences.faults() == {"wrong": 1}


def test_a_draft_model_that_does_not_come_back_is_given_up(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step waits for it until the deadline, once; the drafter stays switched off until its thread is free."""
    sampling, begun, go_on = SamplingParams(max_tokens=12), threading.Event(), threading.Event()
    plain, score = run(target, start(target, [], sampling)), target.score

    def hang() -> None:
        begun.set()
        assert go_on.wait(60.0)

    sequence = start(target, [AlwaysWrong([1] * 400, hang)], sampling)
    monkeypatch.setattr(target, "score", lambda batch: score(batch) if begun.wait(60.0) else None)
    pearl = PearlLoop(target, PlannerOfAllCandidates(), fences := Fences(deadline=0.05))
    while not sequence.finished:
        pearl.step([sequence])
    assert tuple(sequence.output_ids) == plain
    assert fences.faults() == {"wrong": 1}
    assert fences.degraded() == ("wrong",)
    go_on.set()
    pearl.close()
    for _ in range(1000):
        if fences.of("wrong").is_on:
            return
        threading.Event().wait(0.01)
    raise AssertionError("its thread is free, and it is still switched off")


# The planner

LIMITS = Limits(0, 6, 40, frozenset())


def num_draws(planner: PearlPlanner, behind: int, at_hand: int) -> int:
    """How many samples the draft model shows in the next tree."""
    return planner.plan([], {"draft-model": PearlSource(behind, at_hand=at_hand)}, LIMITS).draws["draft-model"]


def planner_that_knows(acceptance: float, milliseconds: float) -> PearlPlanner:
    """Forwards take 10 milliseconds and a twentieth more per row; a sample is known to take so long."""
    planner = PearlPlanner(CostCurve())
    planner.cost.table[:] = 10.0 + 0.5 * torch.arange(len(planner.cost.table)).numpy()
    for depth in range(1, 7):
        for number in range(1000):
            planner.calibrations.of("default").observe("draft-model", depth, number * 0.618034 % 1.0 < acceptance)
    planner.observe_draws("draft-model", 1, 1, milliseconds)
    return planner


def test_a_cheap_draft_is_waited_for_and_a_dear_one_is_not() -> None:
    """With nothing at hand; a draft model that has its prompt to read yet is never waited for."""
    for milliseconds, waits in ((0.1, True), (4.0, False)):
        planner = planner_that_knows(0.8, milliseconds)
        assert bool(num_draws(planner, 1, 0)) == waits
        assert num_draws(planner, 400, 0) == 0


# Engines

PROMPT_OF_ENGINE = tuple(range(40, 70))


@contextmanager
def engine_on(model: PreTrainedModel, draft: PreTrainedModel | None, **settings: object) -> Iterator[Engine]:
    engine = Engine(
        model, byte_tokenizer(), name="tiny", draft_model=draft, cost=CostCurve(),
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
        with engine_on(model, draft, loop="pearl") as engine:
            asked = [engine.submit(PROMPT_OF_ENGINE, sampling) for _ in range(3)]
            results = [generation.result() for generation in asked]
        assert [result.token_ids for result in results] == [plain] * 3
    assert all(result.stats.extra["num_lookaheads_used"] > 0 for result in results)  # in place: whatever the clock says
    assert all(result.stats.accepted_by_source["draft-model"] > 0 for result in results)


def test_the_thread_ends_with_the_engine() -> None:
    """And memory is set aside for what is drawn ahead."""
    model, draft = tiny_causal_lm(), tiny_causal_lm(num_hidden_layers=1)
    reserved = []
    for loop in (None, "pearl"):
        with engine_on(model, draft, loop=loop) as engine:
            engine.submit(PROMPT_OF_ENGINE, SamplingParams(max_tokens=4)).result()
            drafters = engine._drafters_named(("draft-model",))
            reserved.append(engine._kv_bytes(200, 16, engine.speculation, drafters))
            named = [thread for thread in threading.enumerate() if thread.name.startswith("precedent-draft")]
            assert bool(named) == (loop is not None)
        assert not any(thread.is_alive() for thread in named)
    assert reserved[1] >= reserved[0]


# Who draws ahead, and where


def test_what_cannot_draw_ahead_is_refused_by_name() -> None:
    """No draft model, one that shares the target's keys and values, a device for nothing, an object, a toaster."""
    model, tokenizer = tiny_causal_lm(), byte_tokenizer()
    with pytest.raises(ConfigError, match="give such a draft_model="):
        Engine(model, tokenizer, name="tiny", loop="pearl", cost=CostCurve())
    with pytest.raises(UnsupportedError, match="first-layers"):
        Engine(model, tokenizer, name="tiny", draft_model=first_layers(model, 1), loop="pearl", cost=CostCurve())
    with pytest.raises(ConfigError, match="draft_device='cpu' is for a draft model"):
        Engine.load(model, tokenizer=tokenizer, draft_device="cpu")
    with pytest.raises(ConfigError, match="move the model there"):
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


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["the same GPU", "a CPU"])
def test_two_streams_on_a_gpu_answer_as_one(place: str) -> None:
    """Draft and target on one GPU by turns and at once, or apart: in float64 the texts are those of plain decoding."""
    texts, seeded = [], SamplingParams(temperature=0.9, seed=4, max_tokens=64)
    for loop in (None, "pearl"):
        model = tiny_causal_lm(scale=2.0).to("cuda")
        draft = tiny_causal_lm(scale=2.0).to("cpu" if place == "a CPU" else "cuda")
        with engine_on(model, draft, loop=loop) as engine:
            for sampling in (SamplingParams(max_tokens=64), seeded):
                asked = [engine.submit((*PROMPT_OF_ENGINE, last), sampling) for last in range(4)]
                texts.append([generation.result().token_ids for generation in asked])
            if loop:
                sampled = SamplingParams(temperature=0.9, max_tokens=64)
                results = [engine.submit(PROMPT_OF_ENGINE, sampled).result() for _ in range(4)]
                assert all(len(result.token_ids) == 64 for result in results)  # whether drawing pays is the machine's
    assert texts[:2] == texts[2:]


def test_a_draft_model_that_is_waited_for_in_vain_is_left_alone() -> None:
    """After some steps; one whose samples are accepted is not, if the waits are short."""
    for acceptance, waited, goes_on in ((0.01, 5.0, False), (0.8, 0.5, True)):
        planner = planner_that_knows(acceptance, 1.0)
        for _ in range(PROBE_STEPS):
            assert planner.num_draws_ahead("draft-model", 1, LIMITS) == 7
            planner.observe_wait("draft-model", 1, waited)
        assert bool(planner.num_draws_ahead("draft-model", 1, LIMITS)) == goes_on
    assert planner.num_draws_ahead("draft-model", 1, Limits(8, 0, 40, frozenset())) == 0


@in_place_and_on_a_thread
def test_a_cancelled_request_leaves_an_engine_that_answers(
    executor: AtOnce | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled in the middle of an answer, while the draft model is ahead; the next one is the plain one."""
    if executor is not None:
        monkeypatch.setattr(pearl_module, "Background", lambda *_: executor)
    model, draft = tiny_causal_lm(scale=2.0), tiny_causal_lm(scale=2.0)
    long, short = SamplingParams(max_tokens=400), SamplingParams(max_tokens=24)
    with engine_on(model, None) as engine:
        plain = engine.submit(PROMPT_OF_ENGINE, short).result().token_ids
    with engine_on(model, draft, loop="pearl") as engine:
        generation = engine.submit(PROMPT_OF_ENGINE, long)
        for _ in generation:
            break
        with pytest.raises(RequestCancelled):
            generation.result()
        while engine.metrics().num_requests_running:
            time.sleep(0.001)  # its caller knows before its place is free
        assert engine.submit(PROMPT_OF_ENGINE, short).result().token_ids == plain
        kept = engine._drafters["draft-model"].pool  # type: ignore[attr-defined]
        fewest = int(executor is not None)  # a thread may come too late to draw
        assert fewest <= len(kept._idle) <= 1  # the second request went on where the first one was left
