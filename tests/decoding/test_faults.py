"""Faults of whatever only makes answers faster, at every boundary: no request fails, and no answer changes."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.enumeration import RngOfAStep
from helpers.random_trees import toy_model
from helpers.small_engines import PLAIN, PROMPT
from helpers.stepping import AllCandidates, run, start
from helpers.tabled_model import TabledModel
from torch import Tensor

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.loop import DecodeLoop
from precedent.drafters.base import NODE, Asked, Candidates, DrawSession, DrawSource, ForwardSession
from precedent.drafters.request import Request
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.planning.plan import Limits, Plan
from precedent.runtime.fence import Fences
from precedent.sampling.rng import Rng
from precedent.tree import ROOT, Sampled, TreeBuilder
from precedent_testing.embedders import HashEmbedder
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

GREEDY = SamplingParams(max_tokens=12)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
NAN, INFINITY = float("nan"), float("inf")
HUGE = 10**6


def raises(*args: Any, **others: Any) -> Any:
    raise RuntimeError("injected")


class Faulty:
    """A drafter whose sessions have some of their calls replaced."""

    name = "faulty"

    def __init__(self, kind: type, *, begin: Callable[..., Any] | None = None, **replaced: Any) -> None:
        self._kind, self._begin, self._replaced = kind, begin, replaced

    def begin(self, request: Request) -> Any:
        if self._begin is not None:
            return self._begin(request)
        made = type("Replaced", (self._kind,), self._replaced)
        return made(request)

    def close(self) -> None:
        """Fail, as everything here does."""
        raise RuntimeError("injected")


class Matches:
    """Proposes one token, and remembers nothing."""

    def __init__(self, request: Request) -> None:
        self.num_tokens = request.num_tokens

    def match(self, budget: int) -> Any:
        return Candidates.of("faulty", [(65, ROOT, 0.9, 0)])

    def committed(self, token_ids: Sequence[int]) -> None:
        """Nothing to remember."""

    def end(self) -> None:
        """Nothing is held."""


class Draws(Matches, DrawSession):
    """Samples from even odds."""

    behind = 0

    def match(self, budget: int) -> Any:
        return Candidates("faulty")

    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        node, row = ROOT, torch.full((self.num_tokens,), 1.0 / self.num_tokens, dtype=torch.float64)
        for _ in range(number):
            token = rng.categorical(row, node, "draft faulty")
            node = builder.add_sampled(node, token, Sampled(row), "faulty")


class Forwards(Matches, ForwardSession):
    """Candidates that cost a forward."""

    behind = 0

    def match_together(self, asked: Sequence[Asked]) -> None:
        for each in asked:
            each.candidates = Candidates.of("faulty", [(65, ROOT, 0.9, 0)])


def answers(made: Any) -> Callable[..., Any]:
    return lambda *args, **others: made


def candidates(*nodes: tuple[int, int, float, int]) -> Candidates:
    return Candidates.of("faulty", nodes)


def of_row(*numbers: float, size: int = 0) -> Callable[..., None]:
    """A draw from a row that begins with these numbers."""

    def draw(self: Draws, builder: TreeBuilder, number: int, rng: Rng) -> None:
        row = torch.zeros(size or self.num_tokens, dtype=torch.float64)
        row[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        builder.add_sampled(ROOT, 0, Sampled(row), "faulty")

    return draw


def drawn_without_end(self: Draws, builder: TreeBuilder, number: int, rng: Rng) -> None:
    row = torch.full((self.num_tokens,), 1.0 / self.num_tokens, dtype=torch.float64)
    node = ROOT
    for token in range(200):
        node = builder.add_sampled(node, token % 100, Sampled(row), "faulty")


MATCHES = {
    "nothing": None,
    "a list": [1, 2, 3],
    "an estimate that is NaN": candidates((65, ROOT, NAN, 0)),
    "an infinite estimate": candidates((65, ROOT, INFINITY, 0)),
    "a negative estimate": candidates((65, ROOT, -1.0, 0)),
    "a parent behind its child": candidates((65, 1, 0.9, 0), (66, 0, 0.9, 0)),
    "a parent that is not there": candidates((65, HUGE, 0.9, 0)),
    "too many": candidates(*[(65, node - 1, 0.9, 0) for node in range(5000)]),
    "other records": Candidates("faulty", np.zeros(3, dtype=np.float64)),  # type: ignore[arg-type]
    "two dimensions": Candidates("faulty", np.zeros((2, 2), NODE)),
}

DRAFTERS: dict[str, Callable[[], Faulty]] = {
    **{f"{call} raises": lambda call=call: Faulty(Matches, **{call: raises}) for call in ("match", "committed", "end")},
    "begin raises": lambda: Faulty(Matches, begin=raises),
    "begin answers nothing": lambda: Faulty(Matches, begin=answers(None)),
    "begin answers a text": lambda: Faulty(Matches, begin=answers("session")),
    **{
        f"match answers {name}": lambda made=made: Faulty(Matches, match=answers(made))
        for name, made in MATCHES.items()
    },
    "a forward raises": lambda: Faulty(Forwards, match_together=raises),
    "behind a forward raises": lambda: Faulty(Forwards, behind=property(raises)),
    **{
        f"a forward finds {name}": lambda made=made: Faulty(
            Forwards, match_together=lambda self, asked: [setattr(each, "candidates", made) for each in asked]
        )
        for name, made in MATCHES.items()
    },
    "a draw raises": lambda: Faulty(Draws, draw=raises),
    "a group raises": lambda: Faulty(Draws, group=property(raises)),
    "behind raises": lambda: Faulty(Draws, behind=property(raises)),
    "behind is NaN": lambda: Faulty(Draws, behind=NAN),
    "runners-up raise": lambda: Faulty(Draws, names_runners_up=True, draw_runners_up=raises),
    "a row of NaN": lambda: Faulty(Draws, draw=of_row(NAN)),
    "an infinite row": lambda: Faulty(Draws, draw=of_row(INFINITY)),
    "an empty row": lambda: Faulty(Draws, draw=of_row(0.0)),
    "a negative row": lambda: Faulty(Draws, draw=of_row(2.0, -1.0)),
    "a row that is too wide": lambda: Faulty(Draws, draw=of_row(1.0, size=HUGE)),
    "a row that is too short": lambda: Faulty(Draws, draw=of_row(1.0, size=3)),
    "draws without end": lambda: Faulty(Draws, draw=drawn_without_end),
}


@pytest.fixture
def fences() -> Fences:
    """A deadline of a moment."""
    return Fences(deadline=0.1)


@pytest.fixture
def make(fences: Fences) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        settings = {"cost": CostCurve(), **settings}
        model = tiny_causal_lm("llama", seed=21, num_hidden_layers=2)
        made.append(Engine(model, byte_tokenizer(), name="tiny", fences=fences, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def plain_answers(engine: Engine) -> list[tuple[int, ...]]:
    running = [engine.submit(PROMPT, sampling, speculation=PLAIN) for sampling in (GREEDY, SEEDED)]
    return [each.result().token_ids for each in running]


def check_answers(engine: Engine, drafters: tuple[str, ...], **settings: Any) -> None:
    """Greedy and seeded answers of concurrent requests are those of plain decoding, with every drafter and without."""
    plain = plain_answers(engine)
    speculation = SpeculationConfig(drafters=drafters)
    for number in range(2):
        running = [
            engine.submit(PROMPT, sampling, speculation=each, query=f"order {number}", **settings)
            for each in (speculation, SpeculationConfig(drafters=("prompt",)), speculation)
            for sampling in (GREEDY, SEEDED)
        ]
        assert [each.result().token_ids for each in running] == plain * 3
    sampled = engine.submit(PROMPT, SamplingParams(temperature=1.0, max_tokens=8), speculation=speculation).result()
    assert len(sampled.token_ids) == 8
    assert engine.metrics().num_requests_failed == 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_fails_changes_no_answer(make: Callable[..., Engine], name: str) -> None:
    engine = make()
    engine.add_drafter(DRAFTERS[name]())
    check_answers(engine, ("prompt", "faulty"))
    assert engine.metrics().faults["faulty"] >= 3, "the fault was met"
    assert engine.health().degraded == ("faulty",)
    assert engine.health().status == "degraded"


class Curve(CostCurve):
    """A cost curve with some of its calls replaced."""

    learns = True

    def __init__(self, **replaced: Any) -> None:
        super().__init__()
        for name, value in replaced.items():
            setattr(self, name, value)


NUMBERS = {"NaN": NAN, "infinite": INFINITY, "zero": 0.0, "negative": -1.0, "a text": "much", "nothing": None}

CURVES: dict[str, Callable[[], Curve]] = {
    **{f"{call} raises": lambda call=call: Curve(**{call: raises}) for call in ("milliseconds", "beside", "observe")},
    **{
        f"milliseconds are {name}": lambda number=number: Curve(milliseconds=answers(number))
        for name, number in NUMBERS.items()
    },
    **{f"a load that is {name}": lambda number=number: Curve(load=number) for name, number in NUMBERS.items()},
    **{
        f"a table of {name}": lambda number=number: Curve(beside=answers(np.full(257, number)))
        for name, number in NUMBERS.items()
        if isinstance(number, float)
    },
    "an empty table": lambda: Curve(beside=answers(np.empty(0))),
    "a huge table": lambda: Curve(beside=answers(np.ones(HUGE))),
    "a list": lambda: Curve(beside=answers([1.0] * 257)),
}


@pytest.mark.parametrize("name", CURVES)
def test_a_cost_curve_that_fails_changes_no_answer(make: Callable[..., Engine], name: str) -> None:
    engine = make(cost=CURVES[name](), draft_model="first-layers:1")
    check_answers(engine, ("prompt", "draft-model"))
    assert engine.metrics().faults["step costs"] >= 3
    assert engine.health().degraded == ("step costs",)


def too_large(candidates: Any, draw_sources: Any, limits: Limits) -> Plan:
    plan = Plan()
    plan.builder.add_fixed_tree([65] * HUGE, range(-1, HUGE - 1), [("prompt",)] * HUGE)
    return plan


PLANS: dict[str, dict[str, Any]] = {
    **{f"{call} raises": {call: raises} for call in ("plan", "observe", "observe_draws")},
    "nothing": {"plan": answers(None)},
    "expected tokens that are NaN": {"plan": lambda *args: Plan(expected_tokens=NAN)},
    "too large a tree": {"plan": too_large},
    "draws that are NaN": {"plan": lambda *args: Plan(draws={"draft-model": NAN})},  # type: ignore[dict-item]
    "draws of a drafter that is not there": {"plan": lambda *args: Plan(draws={"nobody": 2})},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_planner_that_fails_changes_no_answer(make: Callable[..., Engine], name: str) -> None:
    engine = make(draft_model="first-layers:1")
    for call, replaced in PLANS[name].items():
        setattr(engine.planner, call, replaced)
    check_answers(engine, ("prompt", "draft-model"))
    assert sum(engine.metrics().faults.values()) >= 3


def test_a_calibration_that_is_nan_is_begun_anew(make: Callable[..., Engine]) -> None:
    engine = make()
    check_answers(engine, ("prompt",))
    engine.planner.calibration.accepted[:] = NAN
    check_answers(engine, ("prompt",))
    assert engine.health().degraded == ("planner",)
    assert not np.isnan(engine.planner.calibration.accepted).any()


class FaultyEmbedder(HashEmbedder):
    """An embedder that fails once its engine runs."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.answer: Callable[[Any], Any] | None = None
        self.fault = answer

    def embed(self, texts: Sequence[str]) -> Any:
        made = super().embed(texts)
        return made if self.answer is None else self.answer(made)


EMBEDDINGS: dict[str, Callable[[Any], Any]] = {
    "raises": raises,
    "NaN": lambda made: np.full_like(made, NAN),
    "infinite": lambda made: np.full_like(made, INFINITY),
    "nothing": lambda made: None,
    "empty": lambda made: made[:0],
    "too wide": lambda made: np.ones((len(made), 5000), dtype=np.float32),
    "too many": lambda made: np.ones((5000, made.shape[1]), dtype=np.float32),
}


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_an_embedder_that_fails_changes_no_answer(make: Callable[..., Engine], name: str) -> None:
    embedder = FaultyEmbedder(EMBEDDINGS[name])
    with SpeculationCache.open(None, embedder=embedder) as cache:
        engine = make(cache=cache)
        engine.submit(PROMPT, GREEDY, query="order").result()
        embedder.answer = embedder.fault
        check_answers(engine, ("recall", "prompt"))
        assert sum(engine.metrics().faults.values()) >= 3
        embedder.answer = None


def test_an_embedder_that_hangs_changes_no_answer(make: Callable[..., Engine]) -> None:
    """Both threads of the engine are taken; what is stored and searched behind them has a deadline."""
    go_on = threading.Event()
    embedder = FaultyEmbedder(lambda made: go_on.wait(60.0) and made)
    with SpeculationCache.open(None, embedder=embedder) as cache:
        engine = make(cache=cache)
        embedder.answer = embedder.fault
        check_answers(engine, ("recall", "prompt"))
        assert engine.health().status == "degraded"
        embedder.answer = None
        go_on.set()
        engine.close()


def hanging(go_on: threading.Event) -> Callable[..., Any]:
    return lambda *args: go_on.wait(60.0)


@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_a_store_that_fails_fails_no_answer(make: Callable[..., Engine], kind: str) -> None:
    go_on = threading.Event()
    store = raises if kind == "raises" else hanging(go_on)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = make(cache=cache)
        check_answers(engine, ("prompt",), write_back=store)
        assert "write-back" in engine.health().degraded
        go_on.set()
        engine.close()


@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_an_observer_that_fails_fails_no_answer(make: Callable[..., Engine], kind: str) -> None:
    go_on = threading.Event()
    engine = make(on_result=raises if kind == "raises" else hanging(go_on))
    check_answers(engine, ("prompt",))
    assert engine.health().degraded == ("the observer of results",)
    go_on.set()


@pytest.mark.parametrize("call", ["recall", "among", "credit", "epoch", "since", "ids"])
def test_a_cache_that_fails_fails_no_answer(make: Callable[..., Engine], call: str) -> None:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = make(cache=cache)
        engine.submit(PROMPT, GREEDY, query="order").result()
        setattr(cache, call, raises)
        check_answers(engine, ("recall", "prompt"))
        delattr(cache, call)


def test_what_was_switched_off_comes_back() -> None:
    """Recall's search fails three times, pauses, and serves again: nothing has to be restarted."""
    now = [1000.0]
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        model, fences = tiny_causal_lm("llama", seed=21, num_hidden_layers=2), Fences(lambda: now[0])
        engine = Engine(model, byte_tokenizer(), name="tiny", fences=fences, cost=CostCurve(), cache=cache)
        setattr(cache, "recall", raises)  # noqa: B010
        for number in range(30):  # on a busy machine an answer may end before its search has begun
            engine.submit(PROMPT, GREEDY, query=f"order {number}").result()
            fences.settle()  # the search may end after the answer
            if engine.health().degraded:
                break
        assert engine.health().degraded == engine.metrics().degraded == ("the speculation cache",)
        delattr(cache, "recall")
        now[0] += 31.0
        engine.submit(PROMPT, GREEDY, query="order").result()
        assert engine.health().status == "degraded", "on trial"
        fences.settle()  # a clock that jumps over a search would take it for one that hangs
        now[0] += 60.0
        assert engine.health().status == "ok"
        assert engine.metrics().faults == {"the speculation cache": 3}
        engine.close()


def test_an_engine_lives_through_a_thousand_faults(make: Callable[..., Engine]) -> None:
    """No thread and no memory is left behind; the answers stay the same."""
    fences = Fences(deadline=0.1, switch_off=False)
    model = tiny_causal_lm("llama", seed=21, num_hidden_layers=2)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = Engine(model, byte_tokenizer(), name="tiny", fences=fences, cost=CostCurve(), cache=cache)
        plain = engine.submit(PROMPT, SamplingParams(max_tokens=3), speculation=PLAIN).result().token_ids
        for name in ("begin raises", "match raises", "committed raises", "a draw raises"):
            drafter = DRAFTERS[name]()
            drafter.name = name
            engine.add_drafter(drafter)
        setattr(cache, "recall", raises)  # noqa: B010
        speculation = SpeculationConfig(drafters=("recall", "begin raises", "match raises", "a draw raises"))

        def some(number: int) -> None:
            asked = SamplingParams(max_tokens=3)
            running = [
                engine.submit(PROMPT, asked, speculation=speculation, query="order", write_back=raises)
                for _ in range(number)
            ]
            assert all(each.result().token_ids == plain for each in running)

        some(20)
        gc.collect()
        threads, objects = threading.active_count(), len(gc.get_objects())
        some(200)
        gc.collect()
        assert sum(engine.metrics().faults.values()) >= 1000
        assert threading.active_count() <= threads
        assert len(gc.get_objects()) < objects + 2000, "ten objects a request would be left behind"
        assert engine.health().status == "ok", "these faults only count"
        delattr(cache, "recall")
        engine.close()


# The distribution of unseeded samples, by enumeration of every random number


VOCABULARY = 4


class DrawsFrom(DrawSession):
    """Draws a chain from a table; `broken` decides at which path it fails, `how` what happens there."""

    behind = 0

    def __init__(self, model: Callable[[tuple[int, ...]], Tensor], broken: Any, how: str) -> None:
        self._model, self._broken, self._how, self._text = model, broken, how, ()

    def draw(self, builder: TreeBuilder, number: int, rng: Rng) -> None:
        node, path = ROOT, self._text
        for _ in range(number):
            row = self._model(path)
            if self._broken(path):
                if self._how == "raises":
                    raise RuntimeError("injected")
                row = {"NaN": row * NAN, "huge": row * 1e9, "wide": torch.cat([row, row]), "empty": row * 0.0}[
                    self._how
                ]
                builder.add_sampled(node, 1, Sampled(row), "draft-model")
                return
            token = rng.categorical(row, node, "draft")
            node = builder.add_sampled(node, token, Sampled(row), "draft-model")
            path = (*path, token)

    def committed(self, token_ids: Sequence[int]) -> None:
        self._text = (*self._text, *token_ids)
        if self._how == "committed raises" and self._broken(self._text):
            raise RuntimeError("injected")

    def end(self) -> None:
        """Nothing is held."""


class DrawsTwo(AllCandidates):
    """Two samples in every step."""

    def plan(self, candidates: Any, draw_sources: Any, limits: Limits) -> Plan:
        return Plan(draws={name: min(2, limits.max_depth) for name in draw_sources})


class PlansUntilItFails(DrawsTwo):
    """Fails in its second step."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def plan(self, candidates: Any, draw_sources: dict[str, DrawSource], limits: Limits) -> Plan:
        self._steps += 1
        if self._steps == 2:
            raise RuntimeError("injected")
        return super().plan(candidates, draw_sources, limits)


BROKEN: dict[str, Callable[[tuple[int, ...]], bool]] = {
    "at once": lambda path: not path,
    "behind one token": lambda path: path[-1:] == (2,),
    "from the second token on": lambda path: len(path) >= 1,
}


def distribution_of(draft: Callable[[], Any], mode: str, planner: type[DrawsTwo], length: int) -> dict[Any, float]:
    distribution, found = toy_model("target", VOCABULARY, plain=True), defaultdict(float)
    target = TabledModel(lambda token_ids: distribution(token_ids[1:]).log())

    class Drafting:
        name = "draft-model"

        def begin(self, request: Request) -> Any:
            return draft()

        def close(self) -> None:
            """Nothing is held."""

    def answer(rng: Rng) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1.0, max_tokens=length)
        sequence = start(
            target,
            [Drafting()],
            sampling,
            prompt=(0,),
            mode=mode,
            rng_of=lambda n: RngOfAStep(rng, n),
            ends=frozenset(),
        )
        return run(target, sequence, DecodeLoop(target, planner()))

    with torch.inference_mode():
        for probability, output in enumerate_outcomes(answer):
            found[output] += probability
    return found


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("how", ["raises", "NaN", "huge", "wide", "empty", "committed raises"])
def test_a_draft_model_that_fails_keeps_the_distribution(how: str, broken: str, mode: str) -> None:
    """Also if the failure depends on what was drawn: what is in the tree is verified."""
    draft, target = toy_model("draft", VOCABULARY, plain=True), toy_model("target", VOCABULARY, plain=True)
    found = distribution_of(lambda: DrawsFrom(draft, BROKEN[broken], how), mode, DrawsTwo, 2)
    for (first, second), mass in found.items():
        expected = float(target(())[first]) * float(target((first,))[second])
        assert mass == pytest.approx(expected, abs=1e-12)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)


def test_a_planner_that_fails_keeps_the_distribution() -> None:
    draft, target = toy_model("draft", VOCABULARY, plain=True), toy_model("target", VOCABULARY, plain=True)
    found = distribution_of(lambda: DrawsFrom(draft, lambda path: False, ""), "traversal", PlansUntilItFails, 2)
    for (first, second), mass in found.items():
        expected = float(target(())[first]) * float(target((first,))[second])
        assert mass == pytest.approx(expected, abs=1e-12)
