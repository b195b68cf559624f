"""Faults of whatever only makes answers faster, at every boundary: no request fails, and no answer changes."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.enumeration import RngOfAStep
from helpers.random_trees import toy_model
from helpers.small_engines import PLAIN
from helpers.stepping import AllCandidates, run, start
from helpers.tabled_model import TabledModel
from torch import Tensor

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.loop import DecodeLoop
from precedent.drafters.base import NODE, Asked, Candidates, DrawSession, DrawSource, ForwardSession
from precedent.drafters.request import Request
from precedent.engine.engine import Engine
from precedent.engine.metrics import MetricsRecorder
from precedent.engine.warm_up import RememberedCosts
from precedent.planning.costs import CostCurve, StepCosts
from precedent.planning.planner import Limits, Plan
from precedent.runtime.background import Background
from precedent.runtime.fence import Fences
from precedent.runtime.machine_load import CpuTimes
from precedent.runtime.team import Team
from precedent.sampling.rng import Rng
from precedent.target.support import ModelSupport
from precedent.tree import ROOT, Sampled, TreeBuilder
from precedent.verify import Pending
from precedent_testing.embedders import HashEmbedder
from precedent_testing.replay_rng import enumerate_outcomes
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROMPT = list(b"look up order 17, then order 18, then order 19; never guess a number, and look up order 20")
PREFIX_TOKENS = 70
GREEDY = SamplingParams(max_tokens=12)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=8)
SAMPLINGS = (GREEDY, SEEDED, UNSEEDED)
NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**6


def raises(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def answers(made: Any) -> Callable[..., Any]:
    return lambda *_, **__: made


class FaultyEmbedder(HashEmbedder):
    """An embedder whose answers may be changed while its engine runs."""

    answer: Callable[[Any], Any] | None = None

    def embed(self, texts: Sequence[str]) -> Any:
        made = super().embed(texts)
        return made if self.answer is None else self.answer(made)


class Trial:
    """Engines, a cache on disk for them, and the answers of plain decoding."""

    def __init__(self, folder: Path, expected: Sequence[tuple[int, ...]] = ()) -> None:
        self.embedder, self.go_on, self._expected = FaultyEmbedder(), threading.Event(), list(expected)
        self.cache = SpeculationCache.open(folder / "c.db", embedder=self.embedder)
        self._engines: list[Engine] = []

    def engine(self, hangs: bool = False, **settings: Any) -> Engine:
        """An engine; where something `hangs`, with a deadline of a moment, which a busy machine may miss."""
        model = tiny_causal_lm("llama", seed=21, num_hidden_layers=2)
        settings = {"cost": CostCurve(), "fences": Fences(deadline=0.1) if hangs else Fences(), **settings}
        self._engines.append(Engine(model, byte_tokenizer(), name="tiny", **settings))
        return self._engines[-1]

    def check(self, engine: Engine, *drafters: str, **settings: Any) -> None:
        """Compare answers of concurrent requests with plain decoding's, with these drafters and without.

        Without drafts also unseeded ones, which draw the same random numbers in every trial: so their distribution is
        the same too. With drafts it is enumerated below, since what is drafted decides which numbers are drawn.
        """
        drafted = SpeculationConfig(drafters=drafters or ("prompt",))
        for number in range(2):
            running = [
                engine.submit(PROMPT, sampling, speculation=each, query=f"order {number}", **settings)
                for each, samplings in ((drafted, SAMPLINGS[:2]), (drafted, SAMPLINGS[:2]), (PLAIN, SAMPLINGS))
                for sampling in samplings
            ]
            found = [each.result().token_ids for each in running]
            assert found == [*self._expected[:2] * 2, *self._expected]
        sampled = engine.submit(PROMPT, UNSEEDED, speculation=drafted).result()
        assert len(sampled.token_ids) == 8 or sampled.finish_reason == "stop"
        assert engine.metrics().num_requests_failed == 0

    def hangs(self, *_: Any) -> bool:
        """Block until the trial is over."""
        return self.go_on.wait(60.0)

    def close(self) -> None:
        """Let what hangs go on, and close the engines and the cache, which gets its own calls back."""
        self.go_on.set()
        self.embedder.answer = None
        for one in (self.cache, self.cache.prefixes):
            for name in [name for name in vars(one) if callable(getattr(type(one), name, None))]:
                delattr(one, name)
        for engine in self._engines:
            engine.close()
        self.cache.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """The answers of plain decoding on a sound engine."""
    with pytest.MonkeyPatch.context() as patch, closing(Trial(tmp_path_factory.mktemp("sound"))) as trial:
        patch.setattr("secrets.randbits", lambda bits: 0x5EED)
        engine = trial.engine()
        return [engine.submit(PROMPT, sampling, speculation=PLAIN).result().token_ids for sampling in SAMPLINGS]


@pytest.fixture
def trial(expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr("secrets.randbits", lambda bits: 0x5EED)
    made = Trial(tmp_path, expected)
    yield made
    made.close()


# Drafters


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_that_fails_changes_no_answer(trial: Trial, name: str) -> None:
    engine = trial.engine()
    engine.add_drafter(DRAFTERS[name]())
    trial.check(engine, "prompt", "faulty")
    assert engine.metrics().faults["faulty"] >= 3, "the fault was met"
    assert engine.health().degraded == ("faulty",)
    assert engine.health().status == "degraded"


# The planner and its cost curve


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


class FaultyVerdicts(ModelSupport):
    """Sets verdicts that break when they are read."""

    def verify_ahead(self, pending: Sequence[Pending]) -> None:
        for each in pending:
            each.ahead = raises


class FaultyAhead(ModelSupport):
    """Breaks after it has set a verdict that cannot be read."""

    def verify_ahead(self, pending: Sequence[Pending]) -> None:
        for each in pending[:1]:
            each.ahead = raises
        raises()


@pytest.mark.parametrize("package", [FaultyAhead, FaultyVerdicts])
def test_verification_ahead_that_fails_changes_no_answer(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, package: type[ModelSupport]
) -> None:
    """Verification itself is not fenced; what a package finds in advance is only faster."""
    monkeypatch.setattr("precedent.decoding.verification.installed", lambda: (package(),))
    engine = trial.engine(draft_model="first-layers:1")
    trial.check(engine, "prompt", "draft-model")
    assert engine.metrics().faults["verification ahead"] >= 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CURVES)
def test_a_cost_curve_that_fails_changes_no_answer(trial: Trial, name: str) -> None:
    engine = trial.engine(cost=CURVES[name](), draft_model="first-layers:1")
    trial.check(engine, "prompt", "draft-model")
    assert engine.metrics().faults["step costs"] >= 3
    assert engine.health().degraded == ("step costs",)


def too_large(candidates: Any, draw_sources: Any, limits: Limits) -> Plan:
    plan = Plan()
    plan.builder.add_fixed_tree([65] * 9999, range(-1, 9998), [("prompt",)] * 9999)
    return plan


PLANS: dict[str, dict[str, Any]] = {
    **{f"{call} raises": {call: raises} for call in ("plan", "observe", "observe_draws")},
    "nothing": {"plan": answers(None)},
    "expected tokens that are NaN": {"plan": lambda *args: Plan(expected_tokens=NAN)},
    "too large a tree": {"plan": too_large},
    "draws that are NaN": {"plan": lambda *args: Plan(draws={"draft-model": NAN})},  # type: ignore[dict-item]
    "draws of a drafter that is not there": {"plan": lambda *args: Plan(draws={"nobody": 2})},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_a_planner_that_fails_changes_no_answer(trial: Trial, name: str) -> None:
    engine = trial.engine(draft_model="first-layers:1")
    for call, replaced in PLANS[name].items():
        setattr(engine.planner, call, replaced)
    trial.check(engine, "prompt", "draft-model")
    assert sum(engine.metrics().faults.values()) >= 3


def test_a_calibration_that_is_nan_is_begun_anew(trial: Trial) -> None:
    engine = trial.engine()
    trial.check(engine)
    engine.planner.calibrations.of("default").accepted[:] = NAN
    trial.check(engine)
    assert engine.health().degraded == ("planner",)
    assert not np.isnan(engine.planner.calibrations.of("default").accepted).any()


# The cache, and what is stored and observed on other threads


EMBEDDINGS: dict[str, Callable[[Any], Any]] = {
    "raises": raises,
    "NaN": lambda made: np.full_like(made, NAN),
    "infinite": lambda made: np.full_like(made, INFINITY),
    "nothing": lambda made: None,
    "empty": lambda made: made[:0],
    "too wide": lambda made: np.ones((len(made), 5000), dtype=np.float32),
    "too many": lambda made: np.ones((5000, made.shape[1]), dtype=np.float32),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["hangs", *EMBEDDINGS])
def test_an_embedder_that_fails_changes_no_answer(trial: Trial, name: str) -> None:
    """One that hangs takes both threads of the engine; what is stored and searched behind them has a deadline."""
    engine = trial.engine(name == "hangs", cache=trial.cache)
    engine.submit(PROMPT, GREEDY, query="order").result()
    trial.embedder.answer = EMBEDDINGS.get(name, lambda made: trial.hangs() and made)
    trial.check(engine, "recall", "prompt")
    assert sum(engine.metrics().faults.values()) >= 3
    assert name != "hangs" or engine.health().degraded


@pytest.mark.parametrize("call", ["recall", "among", "credit", "epoch", "since", "ids"])
@pytest.mark.sampled(2)
def test_a_cache_that_fails_fails_no_answer(trial: Trial, call: str) -> None:
    engine = trial.engine(cache=trial.cache)
    engine.submit(PROMPT, GREEDY, query="order").result()
    setattr(trial.cache, call, raises)
    trial.check(engine, "recall", "prompt")


@pytest.mark.parametrize("made", [raises, "hangs", answers(None), answers(NAN), answers("x" * 10**7)])
def test_a_store_that_fails_fails_no_answer_and_what_it_answers_is_not_read(trial: Trial, made: Any) -> None:
    engine = trial.engine(made == "hangs", cache=trial.cache)
    trial.check(engine, write_back=made if callable(made) else trial.hangs)
    assert ("write-back" in engine.health().degraded) is (made in (raises, "hangs"))


def test_an_answer_with_nothing_to_store_waits_for_no_other(trial: Trial) -> None:
    engine, begun = trial.engine(cache=trial.cache), threading.Event()
    storing = engine.submit(PROMPT, GREEDY, query="order", write_back=lambda _: begun.set() or trial.hangs())
    assert begun.wait(60.0)
    engine.submit(PROMPT, GREEDY, speculation=PLAIN).result()
    assert not storing.done


@pytest.mark.parametrize("kind", ["raises", "hangs"])
def test_an_observer_that_fails_fails_no_answer(trial: Trial, kind: str) -> None:
    engine = trial.engine(kind == "hangs", on_result=raises if kind == "raises" else trial.hangs)
    trial.check(engine)
    assert engine.health().degraded == ("the observer of results",)


KEPT: dict[str, Any] = {
    "raises": raises,
    "nothing": answers(None),
    "NaN": answers(NAN),
    "empty": answers(b""),
    "huge": answers(b"x" * 10**7),
}


KEPT_CALLS = [(kind, call) for kind in KEPT for call in ("read", "write", "holds", "discard", "generation")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "call"), [("hangs", "write"), *KEPT_CALLS])
def test_kept_prefixes_that_fail_change_no_answer(trial: Trial, kind: str, call: str) -> None:
    setattr(trial.cache.prefixes, call, KEPT.get(kind, trial.hangs))
    engine = trial.engine(kind == "hangs", cache=trial.cache, keep_prefixes=True)
    trial.check(engine, prefix_tokens=PREFIX_TOKENS)
    if kind == "raises" and call in ("read", "holds"):
        assert engine.metrics().faults["kept prefixes"] >= 1, "the fault was met"


# What an engine counts and measures


@pytest.mark.parametrize("call", ["stepped", "ended"])
def test_metrics_that_fail_change_no_answer(trial: Trial, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsRecorder, call, raises)
    trial.check(engine := trial.engine())
    assert engine.health().degraded == ("metrics",)
    assert engine.metrics().faults == {"metrics": 3}


@pytest.mark.parametrize("number", [NAN, INFINITY, 1e300, None], ids=str)
def test_times_that_cannot_be_change_no_answer(trial: Trial, number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics of a request are what the metrics read."""
    ended = MetricsRecorder.ended

    def of_other_times(self: MetricsRecorder, how: str, stats: Any, *others: Any) -> None:
        stats.queue_seconds = stats.first_token_seconds = stats.total_seconds = stats.plain_seconds = number
        ended(self, how, stats, *others)

    monkeypatch.setattr(MetricsRecorder, "ended", of_other_times)
    trial.check(trial.engine())


COSTS: dict[str, Any] = {
    "raises": raises,
    "nothing": answers(None),
    "NaN": answers(NAN),
    "a text": answers("costs"),
    "another curve": answers(CostCurve()),
}


@pytest.mark.parametrize("kind", COSTS)
def test_remembered_costs_that_fail_change_no_answer(trial: Trial, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RememberedCosts, "read", COSTS[kind])
    monkeypatch.setattr(RememberedCosts, "write", raises)
    trial.check(engine := trial.engine(cost=None))
    assert isinstance(engine.planner.cost, StepCosts)


def times(*numbers: Any) -> Callable[[], CpuTimes]:
    return lambda: CpuTimes(*numbers)


LOADS: dict[str, dict[str, Callable[[], Any]]] = {
    "reading raises": {"read": raises},
    "the clock raises": {"clock": raises},
    "the quota raises": {"quota": raises},
    "nothing": {"read": answers(None)},
    "a text": {"read": answers("busy")},
    "times that are NaN": {"read": times(NAN, NAN, NAN, 2)},
    "huge times": {"read": times(1e300, 1e300, 0.0, 10**9)},
    "no processors": {"read": times(1.0, 1.0, 1.0, 0)},
    "NaN processors": {"read": times(1.0, 1.0, 1.0, NAN)},
    "a clock that is NaN": {"clock": answers(NAN)},
    "a quota of NaN": {"quota": answers(NAN)},
    "a quota of nothing": {"quota": answers(0.0)},
    "a negative quota": {"quota": answers(-3.0)},
    "a huge quota": {"quota": answers(1e300)},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOADS)
def test_a_machine_load_that_fails_changes_no_answer(trial: Trial, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    engine = trial.engine()
    engine.target.runner.team = team = Team(**LOADS[name])
    trial.check(engine)
    assert 1 <= team.size(2) <= 2


# In the long run


@pytest.mark.usefixtures("searches_at_once")
def test_what_was_switched_off_comes_back(trial: Trial) -> None:
    """Recall's search fails three times, pauses, and serves again: nothing has to be restarted."""
    now = [1000.0]
    engine = trial.engine(fences=Fences(lambda: now[0]), cache=trial.cache)
    setattr(trial.cache, "recall", raises)  # noqa: B010
    for number in range(3):
        engine.submit(PROMPT, GREEDY, query=f"order {number}").result()
    assert engine.health().degraded == engine.metrics().degraded == ("the speculation cache",)
    delattr(trial.cache, "recall")
    now[0] += 31.0
    engine.submit(PROMPT, GREEDY, query="order").result()
    assert engine.health().status == "degraded", "on trial"
    now[0] += 60.0
    assert engine.health().status == "ok"
    assert engine.metrics().faults == {"the speculation cache": 3}


def test_an_engine_lives_through_a_thousand_faults(trial: Trial) -> None:
    """No thread and no memory is left behind; the answers stay the same."""
    executor, asked = Background(2, "precedent-cache"), SamplingParams(max_tokens=3)
    engine = trial.engine(fences=Fences(switch_off=False), cache=trial.cache, executor=executor)
    plain = engine.submit(PROMPT, asked, speculation=PLAIN).result().token_ids
    names = ("begin raises", "match raises", "a draw raises")
    for name in names:
        drafter = DRAFTERS[name]()
        drafter.name = name
        engine.add_drafter(drafter)
    setattr(trial.cache, "recall", raises)  # noqa: B010
    settings = {"speculation": SpeculationConfig(drafters=("recall", *names)), "query": "order", "write_back": raises}

    def several(number: int) -> None:
        running = [engine.submit(PROMPT, asked, **settings) for _ in range(number)]
        assert all(each.result().token_ids == plain for each in running)

    several(20)
    executor.submit(gc.collect).result()  # after all work that was cancelled and still waited
    threads, objects = threading.active_count(), len(gc.get_objects())
    several(230)  # four faults each, and recall's where its search begins before the answer is over
    executor.submit(gc.collect).result()
    assert sum(engine.metrics().faults.values()) >= 1000
    assert threading.active_count() <= threads
    assert len(gc.get_objects()) < objects + 2000, "ten objects a request would be left behind"
    assert engine.health().status == "ok", "these faults only count"


# The distribution of unseeded samples, by enumeration of every random number


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
                rows = {"NaN": row * NAN, "huge": row * 1e9, "wide": torch.cat([row, row]), "empty": row * 0.0}
                builder.add_sampled(node, 1, Sampled(rows[self._how]), "draft-model")
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
    """Two samples in every step; fails in step number `fails_in`."""

    def __init__(self, fails_in: int = 0) -> None:
        super().__init__()
        self._steps, self._fails_in = 0, fails_in

    def plan(self, candidates: Any, draw_sources: dict[str, DrawSource], limits: Limits) -> Plan:
        self._steps += 1
        if self._steps == self._fails_in:
            raise RuntimeError("injected")
        return Plan(draws={name: min(2, limits.max_depth) for name in draw_sources})


BROKEN: dict[str, Callable[[tuple[int, ...]], bool]] = {
    "at once": lambda path: not path,
    "behind one token": lambda path: path[-1:] == (2,),
    "from the second token on": lambda path: len(path) >= 1,
    "never": lambda path: False,
}
FAULTS = [
    (how, broken, mode, 0)
    for how in ("raises", "NaN", "huge", "wide", "empty", "committed raises")
    for broken in ("at once", "behind one token", "from the second token on")
    for mode in ("traversal", "topdown")
]


@pytest.mark.parametrize(("how", "broken", "mode", "fails_in"), [("", "never", "traversal", 2), *FAULTS])
@pytest.mark.sampled(4)
def test_a_draft_model_or_a_planner_that_fails_keeps_the_distribution(
    how: str, broken: str, mode: str, fails_in: int
) -> None:
    """Also if the failure depends on what was drawn: what is in the tree is verified."""
    draft, model = toy_model("draft", 3, plain=True), toy_model("target", 3, plain=True)
    target, found, num_faults = TabledModel(lambda token_ids: model(token_ids[1:]).log()), defaultdict(float), 0

    class Drafting:
        name = "draft-model"

        def begin(self, request: Request) -> Any:
            return DrawsFrom(draft, BROKEN[broken], how)

    def answer(rng: Rng) -> tuple[int, ...]:
        nonlocal num_faults
        sampling, rng_of = SamplingParams(temperature=1.0, max_tokens=3), lambda n: RngOfAStep(rng, n)
        sequence = start(target, [Drafting()], sampling, prompt=(0,), mode=mode, rng_of=rng_of, ends=frozenset())
        output = run(target, sequence, DecodeLoop(target, DrawsTwo(fails_in), fences := Fences()))
        num_faults += sum(fences.faults().values())
        return output

    with torch.inference_mode():
        for probability, output in enumerate_outcomes(answer):
            found[output] += probability
    for path, mass in found.items():
        expected = prod(float(model(path[:place])[token]) for place, token in enumerate(path))
        assert mass == pytest.approx(expected, abs=1e-12)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert num_faults, "the fault was met"
