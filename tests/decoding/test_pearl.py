"""PEARL: the draft model draws while the target scores, and the answer stays the target's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers.pearl import PlannerOfAllCandidates, in_place, run, start
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding import pearl as pearl_module
from precedent.decoding import verification
from precedent.decoding.loop import step
from precedent.decoding.pearl import Pearl, pearl_for
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.model.lookahead import DraftedToken, DrawsAhead, Lookahead
from precedent.drafters.request import Request
from precedent.engine.engine import Engine
from precedent.errors import ConfigError, GenerationError, RequestCancelled, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.runtime.background import Background
from precedent.runtime.inline_executor import AtOnce
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.target.load.first_layers import first_layers, layers_of
from precedent.target.load.loading import load_draft
from precedent.testing.drafters import OracleDrafter, RandomDrafter
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent.tree import CandidateTree, Fixed, Sampled, TreeBuilder


class FlatCost(CostCurve):
    """Every width costs the same, whatever the clock says."""

    def observe(self, width: int, milliseconds: float) -> None:
        """Nothing is learned."""


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
    plain = run(target, start(target, [], sampling))
    monkeypatch.setattr(verification, "on_accelerator", lambda logits: read_at_once)
    oracle, adversary = OracleDrafter(plain), RandomDrafter(target.vocab_size)
    for others in ([], [oracle], [adversary], [oracle, adversary]):
        for draft in (good_draft(), bad_draft()):
            assert run(target, start(target, [*others, draft], sampling), pearl) == plain


def test_a_draft_model_that_agrees_is_never_waited_for_and_always_used(target: TargetModel) -> None:
    """The first step verifies one sample by the row it has anyway; each later one begins with the three behind it."""
    sampling = SamplingParams(max_tokens=25)
    plain = run(target, start(target, [], sampling))
    sequence = start(target, [good_draft()], sampling)
    assert run(target, sequence, in_place(), PlannerOfAllCandidates(most_ahead=4)) == plain
    stats = sequence.stats
    assert stats.num_steps == 7  # 1 token, then 4 each: three at hand, and the next one verified at once
    assert stats.accepted_by_source == {"draft-model": 25}
    assert stats.num_lookaheads == 7
    assert stats.num_lookaheads_used == 6  # after the last step the answer is over
    assert stats.as_dict()["num_lookaheads_used"] == 6


def test_a_draft_model_that_errs_is_forgotten_after_each_error(target: TargetModel) -> None:
    """Every lookahead is dropped, and every step costs what a plain one costs: one token, one row."""
    sampling = SamplingParams(max_tokens=20)
    plain = run(target, start(target, [], sampling))
    sequence = start(target, [AlwaysWrong(plain)], sampling)
    assert run(target, sequence, in_place()) == plain
    assert sequence.stats.num_steps == sequence.stats.num_lookaheads == 20
    assert sequence.stats.num_lookaheads_used == sequence.stats.num_accepted_tokens == 0
    assert sequence.stats.num_draft_tokens == 20  # the one that is verified at once


def test_a_lossy_mode_shows_samples_at_hand_and_verifies_none_without_a_row(target: TargetModel) -> None:
    """Its rule sees what is proposed below a node before the target's row is used: nothing may be added later."""
    sequence = start(target, [good_draft()], SamplingParams(temperature=1.0, max_tokens=20), mode="lossy_typical")
    run(target, sequence, in_place())
    stats = sequence.stats
    assert stats.num_lookaheads >= stats.num_lookaheads_used > 0
    assert stats.num_lookaheads == stats.num_steps
    assert stats.num_draft_tokens <= 3 * stats.num_steps, "three at hand, and no leaf more"


class AlwaysWrong:
    """Draws ahead, never what the target says."""

    name = "wrong"

    def __init__(self, answer: Sequence[int]) -> None:
        self._answer = answer

    def begin(self, request: Request) -> WrongSession:
        return WrongSession(self._answer)

    def close(self) -> None:
        """Nothing is held."""


class WrongSession(DrawsAhead):
    def __init__(self, answer: Sequence[int]) -> None:
        self._answer, self._done, self._ahead = answer, 0, Lookahead()

    @property
    def at_hand(self) -> int:
        return self._ahead.unseen

    @property
    def behind(self) -> int:
        return 0

    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        assert number == 0

    def draw_ahead(self, rng: Rng) -> bool:
        self._ahead.chain.append(DraftedToken((self._answer[self._done] + 1) % 250 + 1, Fixed()))
        return True

    def extended(self, tree: CandidateTree) -> CandidateTree:
        return self._ahead.extended(tree, "wrong", lambda drafted: drafted)

    def committed(self, token_ids: Sequence[int]) -> None:
        self._done = min(self._done + len(token_ids), len(self._answer) - 1)
        self._ahead.settle(token_ids)

    def end(self) -> None:
        """Nothing is held."""


# What is left behind


class Watched(WrongSession):
    """Draws when it is told to, and knows whether it is at it."""

    def __init__(self, answer: Sequence[int], before: Callable[[], object]) -> None:
        super().__init__(answer)
        self.made, self.at_it, self._before = 0, False, before

    def draw_ahead(self, rng: Rng) -> bool:
        self.at_it = True
        self._before()
        self.made, self.at_it = self.made + 1, False
        return super().draw_ahead(rng)


def watched(target: TargetModel, before: Callable[[], object]) -> tuple[DecodingSequence, Watched]:
    sequence = start(target, [AlwaysWrong([1] * 400)], SamplingParams(max_tokens=400))
    session = sequence.sessions["wrong"] = Watched([1] * 400, before)
    return sequence, session


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
    pearl = Pearl()
    step([sequence], target, PlannerOfAllCandidates(most_ahead=300), pearl)
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
    pearl = Pearl()
    step([sequence], target, PlannerOfAllCandidates(most_ahead=300), pearl)
    pearl.close()
    assert isinstance(sequence.error, GenerationError)
    assert "the target is ill" in str(sequence.error)
    assert session.made >= 1
    assert not session.at_it


def test_a_draft_model_that_fails_ahead_fails_its_own_request_alone(target: TargetModel, pearl: Pearl) -> None:
    """Its neighbour's answer is the plain one."""
    sampling = SamplingParams(max_tokens=12)
    plain = run(target, start(target, [], sampling))

    def ill() -> None:
        raise RuntimeError("the draft model is ill")

    failing, _ = watched(target, ill)
    healthy = start(target, [good_draft()], sampling)
    running, planner = [failing, healthy], PlannerOfAllCandidates()
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


# Who draws ahead, and where


def on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device))


def test_by_default_only_a_draft_model_elsewhere_draws_ahead() -> None:
    """On one device it is asked for by name."""
    here, there = on("cpu"), on("meta")
    for draft, wanted, expected in (
        (there, None, True), (here, None, False), (here, True, True), (there, False, False), (None, None, False),
    ):  # fmt: skip
        pearl = pearl_for(draft, here, wanted, early_exit=False)  # type: ignore[arg-type]
        assert (pearl is not None) == expected
    assert pearl_for(there, here, None, early_exit=True) is None  # type: ignore[arg-type]


def test_what_cannot_draw_ahead_is_refused_by_name() -> None:
    """No draft model, one that shares the target's keys and values, a device for nothing, an object, a toaster."""
    model, tokenizer = tiny_causal_lm(), byte_tokenizer()
    with pytest.raises(ConfigError, match="give draft_model="):
        Engine(model, tokenizer, name="tiny", pearl=True, cost=FlatCost())
    with pytest.raises(UnsupportedError, match="first-layers"):
        Engine(model, tokenizer, name="tiny", draft_model=first_layers(model, 1), pearl=True, cost=FlatCost())
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


def test_distributions_are_handed_on_to_where_the_target_verifies() -> None:
    """The row moves, what was excluded stays."""
    drafter = DraftModelDrafter(TargetModel(tiny_causal_lm()), hand_to=torch.device("meta"))
    distribution = drafter.handed_on(Sampled(torch.tensor([0.5, 0.5]), (1,)))
    assert (distribution.row.device.type, distribution.excluded) == ("meta", (1,))


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
