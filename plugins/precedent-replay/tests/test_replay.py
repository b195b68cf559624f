"""Replay on logs written here: what is measured, what each turn may see, how contenders compare, and what it says."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.saved_models import saved
from typer.testing import CliRunner

from precedent.cache import Completion
from precedent.cli.app import app
from precedent.decoding.loop import DecodeLoop
from precedent.drafters import Candidates
from precedent.drafters.matching.token_index import TokenIndex, reversed_context
from precedent.errors import ConfigError, PromptError
from precedent.pages.colours import SOURCES
from precedent.planning import Limits, Plan, Planner
from precedent.planning.costs import CostCurve
from precedent.runtime.machine_load import BUSY_SHARE
from precedent.text.traces import read_trajectories
from precedent.tree import TreeBuilder, chain
from precedent_replay.baselines import AdaPLD, Contender, SglangNgram, SuffixDecoding, SuffixTree, best_suffix_tree
from precedent_replay.contenders import lineup
from precedent_replay.pool import Pool
from precedent_replay.results import Replay, Report, Tally, accepted_path, replay_turn
from precedent_replay.run import Settings, replay
from precedent_replay.settings import IDEAS, MEASURED, MeasuredSteps
from precedent_replay.table import FEWEST_TURNS, verdict
from precedent_replay.turns import Turn, TurnReader
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

ANSWER = "your order is on its way and will arrive on monday"


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversation(task: str, order: int, *answers: str, **fields: str) -> dict[str, Any]:
    """A log record: a question, then answers, each followed by a thank-you."""
    turns = [turn for answer in answers for turn in (said("assistant", answer), said("user", "thanks"))]
    return {"task_id": task, "order": order, "messages": [said("user", task), *turns], **fields}


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two runs of one task and one of another, of two customers, not in time order."""
    return written(
        tmp_path / "log.jsonl",
        conversation("where is it", 2, ANSWER, group="ann"),
        conversation("where is it", 1, ANSWER, group="ann"),
        conversation("cancel it", 3, "it is cancelled", ANSWER, group="bob"),
    )


NAMES = ("ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hana")


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """Runs that differ in a name, which is in the answer three times; the first two of them twice."""
    text = "dear {0}, your parcel has left our house; {0}, we thank you for waiting. goodbye {0} and be well"
    runs = [
        conversation(f"where is the parcel of {name}?", n, text.format(name), group=name)
        for n, name in enumerate((*NAMES, *NAMES[:2]))
    ]
    return written(tmp_path / "names.jsonl", *runs)


def found_in(log: Path, *, warm: Sequence[Path] = (), similar: bool = True, **settings: Any) -> dict[str, Any]:
    return replay([log], warm, byte_tokenizer(), HashEmbedder() if similar else None, Settings(**settings)).as_dict()


def rows(log: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    """The rows of a replay by name."""
    return {row["name"]: row for row in found_in(log, **settings)["drafters"]}


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, ["replay", *map(str, words)])


# Logs


def test_trajectories_come_in_time_order(log: Path) -> None:
    """A file that is not sorted is read in the order of its `order` fields, plain or compressed."""
    packed = log.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(log.read_bytes()))
    for path in (log, packed):
        runs = [(run.task, run.group) for run in read_trajectories([path])]
        assert runs == [("where is it", "ann"), ("where is it", "ann"), ("cancel it", "bob")]
    assert [run.number for run in read_trajectories([log, packed])] == list(range(6))


def test_a_line_that_is_no_log_is_named(tmp_path: Path) -> None:
    answer = {"messages": [said("user", "hi")], "response": "hello"}
    for text, reason in (
        ("{", "is not JSON"),
        ('{"a": 1}', "not a chat trace"),
        ('{"inputs": {}}', "LangSmith"),
        (json.dumps(answer), "has a `response`"),
    ):
        path = tmp_path / "bad.jsonl"
        path.write_text('{"messages": []}\n' + text + "\n")
        with pytest.raises(PromptError, match=f"line 2 .*{reason}"):
            list(read_trajectories([path]))
    with pytest.raises(PromptError, match="cannot read"):
        list(read_trajectories([tmp_path / "missing.jsonl"]))


def test_langsmith_runs_are_read_and_those_of_one_thread_belong_together(tmp_path: Path) -> None:
    """Serialised or plain messages; only the recorded answer is measured; a session is a whole project."""
    serialised = {"lc": 1, "id": ["langchain", "schema", "messages", "HumanMessage"], "kwargs": {"content": "hi"}}
    answer = {"id": ["AIMessage"], "kwargs": {"content": "", "tool_calls": [{"name": "look_up", "args": {"order": 1}}]}}
    run = {
        "inputs": {"messages": [[said("assistant", "earlier"), serialised]]},
        "outputs": {"generations": [[{"message": answer}]]},
        "extra": {"invocation_params": {"tools": [{"type": "function"}]}},
        "session_id": "project",
    }
    threads = [{**run, "extra": {"metadata": {"thread_id": name}}} for name in "aba"]
    traces = [{**run, "trace_id": name} for name in "cd"]
    first, *others = read_trajectories([written(tmp_path / "runs.jsonl", run | {"trace_id": "x"}, *threads, *traces)])
    (turn,) = TurnReader(byte_tokenizer()).turns(first)
    assert [message["role"] for message in first.messages] == ["assistant", "user", "assistant"]
    assert first.tools == ({"type": "function"},)
    text = '<tool_call>\n{"name": "look_up", "arguments": {"order": 1}}\n</tool_call>'
    assert (turn.calls_tools, byte_tokenizer().decode(turn.token_ids[:-1])) == (True, text)
    assert [(each.number, each.task) for each in others] == [(1, "a"), (1, "a"), (2, "b"), (3, "c"), (4, "d")]


def test_calls_of_one_conversation_come_together_and_hide_one_another(tmp_path: Path) -> None:
    """However they were interleaved; in `same-task` a call must not see what its own conversation says later."""

    def call(name: str, answer: str, *history: str) -> dict[str, Any]:
        messages = [said(("user", "assistant")[n % 2], text) for n, text in enumerate(("hello", *history))]
        return {"conversation_id": name, "messages": messages, "response": said("assistant", answer)}

    long = "this is a rather long answer that nobody else gives"
    mixed = [call("a", long), call("b", "short"), call("a", long, long, "again"), call("b", "bye", "short", "ok")]
    log = written(tmp_path / "log.jsonl", *mixed)
    runs = list(read_trajectories([log]))
    assert [(run.number, run.group) for run in runs] == [(0, "a"), (0, "a"), (1, "b"), (1, "b")]
    assert all(run.only_last for run in runs)
    assert rows(log, pool="same-task")["recall"]["tokens_per_step"] == 1.0
    assert rows(log, pool="online")["recall"]["kinds"]["text"]["turns"] == 4
    wrapped = {
        "request": {"messages": [said("user", "hi")]},
        "response": {"choices": [{"message": said("x", "hello")}]},
    }
    (run,) = read_trajectories([written(log, wrapped)])
    assert run.messages[-1] == said("assistant", "hello")


# Pools


def test_pools_show_what_they_say(log: Path) -> None:
    """The third turn that says the known answer: seen online and by same-task; the first one only by same-task."""
    steps = {pool: rows(log, pool=pool)["recall+prompt"]["tokens_per_step"] for pool in ("none", "online")}
    assert steps["none"] < steps["online"]
    ann, bob = frozenset({"ann"}), frozenset({"bob"})
    oracle, others = (rows(log, pool=pool, groups=ann)["recall"] for pool in ("same-task", "other-tasks"))
    assert oracle["tokens_per_step"] > others["tokens_per_step"] > 1.5  # bob said it as well
    assert rows(log, pool="other-tasks", groups=bob)["recall"]["tokens_per_step"] > 1.2


def test_a_turn_never_sees_itself(tmp_path: Path) -> None:
    """Hidden are all turns of the trajectory in `same-task`, all of the group in `other-tasks`."""
    log = written(tmp_path / "log.jsonl", *(conversation(f"t{n}", n, ANSWER, group="ann") for n in range(2)))
    assert rows(log, pool="same-task")["recall"]["tokens_per_step"] > 2
    assert rows(log, pool="other-tasks")["recall"]["tokens_per_step"] == 1.0
    single = written(tmp_path / "single.jsonl", conversation("t", 0, ANSWER))
    assert "suffix" not in rows(single, pool="same-task")["suffix"]["accepted_by_source"]


@pytest.mark.parametrize("pool", ["online", "none"])
def test_a_warm_log_is_in_every_pool(pool: str, log: Path, tmp_path: Path) -> None:
    new = written(tmp_path / "new.jsonl", conversation("something new", 0, ANSWER))
    cold, warm = (rows(new, pool=pool, warm=logs)["recall"]["tokens_per_step"] for logs in ([], [log]))
    assert cold == 1.0 < warm


def test_the_limit_counts_measured_turns(log: Path) -> None:
    found = found_in(log, similar=False, limit=3)
    counts = [sum(row["kinds"][kind]["turns"] for kind in ("text", "tool_calls")) for row in found["drafters"]]
    assert {found["turns"], *counts} == {3}
    assert found["tokens"] == sum(map(len, (ANSWER, ANSWER, "it is cancelled"))) + 3


def pool_of(*answers: Sequence[int]) -> Pool:
    pool = Pool()
    for answer in answers:
        pool.add(Completion(tuple(answer), "", ""))
    return pool


def test_answers_that_stand_in_the_pool_are_counted_and_measured_apart(names: Path) -> None:
    found = found_in(names, similar=False)
    kinds = found["drafters"][-1]["kinds"]
    assert found["exact_repeats"] == kinds["exact_repeats"]["turns"] == 2
    assert kinds["exact_repeats"]["tokens_per_step"] > kinds["text"]["tokens_per_step"]
    pool = pool_of([1, 2], [1, 2], [3])
    pool.hide([1])
    assert [pool.holds(ids) for ids in ((1, 2), (3,), (4,))] == [True, True, False]
    pool.hide([2])
    assert not pool.holds((1, 2))


# Contenders


def naive_suffix_tree(texts: list[list[int]], context: list[int], alpha: float, most: int, one_path: bool) -> float:
    """The best score over all match lengths, by counting continuations one prefix at a time."""
    best = 0.0
    for length in range(1, len(context) + 1):
        size, end = min(most, int(alpha * length)), context[-length:]
        behind = [
            text[at + length :] for text in texts for at in range(len(text) - length) if text[at : at + length] == end
        ]
        waiting, score = {(): (1.0, behind)}, 0.0
        for picked in range(size + 1):
            ready = [path for path in waiting if waiting[path][0] >= 0.1]
            if not ready:
                break
            path = max(ready, key=lambda p: (waiting[p][0], *(-token for token in p)))
            chance, rests = waiting.pop(path)
            if one_path:
                waiting.clear()
            score += chance if path else 0.0
            if picked == size:
                break
            counts = Counter(rest[len(path)] for rest in rests if len(rest) > len(path))
            for token, count in counts.items():
                below = [rest for rest in rests if len(rest) > len(path) and rest[len(path)] == token]
                waiting[(*path, token)] = (chance * count / len(rests), below)
        best = max(best, score)
    return best


@pytest.mark.parametrize("one_path", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 4.0])
def test_suffix_decoding_equals_counting_by_hand(alpha: float, one_path: bool) -> None:
    """The score of the chosen tree is the best over all match lengths, and its nodes are as many as allowed."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        texts = [rng.integers(0, 3, rng.integers(2, 14)).tolist() for _ in range(4)]
        index = TokenIndex()
        for number, text in enumerate(texts):
            index.append(number, text)
        context = rng.integers(0, 3, 6).tolist()
        recent = reversed_context(context)
        tokens, parents, score = best_suffix_tree(index.text.tokens, index.order, recent, alpha, 8, one_path=one_path)
        assert score == pytest.approx(naive_suffix_tree(texts, context, alpha, 8, one_path))
        assert len(tokens) <= 8
        assert all(parent < node for node, parent in enumerate(parents.tolist()))


def after(texts: Sequence[Sequence[int]], end: Sequence[int]) -> list[Sequence[int]]:
    """What follows each place where `end` stands, nothing at the end of a text left out."""
    size = len(end)
    return [
        text[at + size :] for text in texts for at in range(len(text) - size) if list(text[at : at + size]) == list(end)
    ]


def path_scores(texts: Sequence[Sequence[int]], context: Sequence[int], depth: int) -> dict[tuple[int, ...], float]:
    """The scores of all paths of at most `depth` tokens: the longest match's length, of 18, times shares of counts."""
    length = next((size for size in range(min(18, len(context)), 0, -1) if after(texts, context[-size:])), 0)
    scores: dict[tuple[int, ...], float] = {(): length / 18}
    waiting = list(scores) if length else []
    while waiting:
        path = waiting.pop()
        counts = Counter(rest[0] for rest in after(texts, [*context[-length:], *path]) if rest)
        for token, count in counts.items() if len(path) < depth else ():
            scores[*path, token] = scores[path] * count / counts.total()
            waiting.append((*path, token))
    return {path: score for path, score in scores.items() if path}


def test_sglangs_tree_has_the_best_paths_of_live_text_and_pool_together() -> None:
    """Counted one path at a time: a path's score is the better of the two sources'."""
    rng = np.random.default_rng(5)
    for budget in (3, 8, 8, 8, 20):
        pooled = [tuple(rng.integers(0, 3, rng.integers(2, 9)).tolist()) for _ in range(4)]
        live = rng.integers(0, 3, 12).tolist()
        contender = SglangNgram(pool_of(*pooled), budget)
        contender.begin(Turn(tuple(live), ()))
        tree = contender.propose()
        scores = Counter(path_scores([live], live, 12))
        scores |= Counter(path_scores(pooled, live, 12))
        paths = [tuple(np.array(tree.token_ids)[row].tolist()) for row in tree.ancestors]
        assert len(set(paths)) == len(paths) == min(budget, len(scores))
        best = sorted(scores.values(), reverse=True)[: len(paths)]
        assert [scores[path] for path in paths] == pytest.approx(best)


def unit(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def adapld(budget: int, prompt: Sequence[int], query: str, **completions: Sequence[int]) -> AdaPLD:
    """A contender at the beginning of a turn; completions are named by their query: `far` or `near` to the turn's."""
    pool = Pool({"far": unit(0, 1), "near": unit(1, 0.1), "here": unit(1, 0)})
    for name, ids in completions.items():
        pool.add(Completion(tuple(ids), "", "", query=name))
    contender = AdaPLD(pool, budget)
    contender.begin(Turn(tuple(prompt), (), query=query))
    return contender


def paths_of(contender: Contender) -> list[tuple[int, ...]]:
    """The proposed paths, from the root to each leaf."""
    tree = contender.propose()
    leaves = set(range(len(tree))) - set(tree.parents)
    return [tuple(np.array(tree.token_ids)[tree.ancestors[leaf]].tolist()) for leaf in sorted(leaves)]


def test_adapld_copies_the_most_similar_of_the_longest_matches_and_branches_at_the_likely_tokens() -> None:
    texts = {"near": [1, 2, 5, 6, 7, 8], "far": [1, 2, 3, 4, 9, 9, 2, 3, 4]}
    first, branch = paths_of(adapld(8, [7, 1, 2], "here", **texts))
    assert first == (5, 6, 7, 8)  # (1, 2) stands in both
    assert branch == (3, 4)  # the commonest other token after a 2, and its successor
    assert paths_of(adapld(8, [0, 9, 2], "here", **texts))[0] == (3, 4)  # the longer match, though less similar


def test_adapld_continues_the_most_similar_completion_where_nothing_matches() -> None:
    contender = adapld(8, [100], "here", far=[1, 2, 3], near=[4, 5, 6])
    assert paths_of(contender) == [(4, 5, 6)]
    contender.committed((), [101])
    assert paths_of(contender) == [(5, 6)]
    assert paths_of(adapld(8, [100], "here")) == []


@pytest.mark.parametrize("budget", [8, 32])
@pytest.mark.parametrize("made", [SuffixTree, SglangNgram, AdaPLD])
def test_no_baseline_proposes_more_nodes_than_allowed(
    made: type[SuffixTree | SglangNgram | AdaPLD], budget: int
) -> None:
    rng = np.random.default_rng(1)
    contender = made(pool_of(*(rng.integers(0, 4, 40).tolist() for _ in range(5))), budget)
    contender.begin(Turn(tuple(rng.integers(0, 4, 40).tolist()), ()))
    sizes = set[int]()
    for token in rng.integers(0, 4, 20).tolist():
        sizes.add(len(contender.propose()))
        contender.committed((), [token])
    assert budget // 2 <= max(sizes) <= budget


def test_with_one_path_no_contender_branches() -> None:
    rng = np.random.default_rng(2)
    pool, longest = pool_of(*(rng.integers(0, 3, 30).tolist() for _ in range(6))), Counter[str]()
    for entry in lineup(pool, Settings(one_path=True, budgets=(8,)), 9):
        entry.contender.begin(Turn(tuple(rng.integers(0, 3, 30).tolist()), ()))
        for token in rng.integers(0, 3, 10).tolist():
            tree = entry.contender.propose()
            assert list(tree.parents) == list(range(-1, len(tree) - 1))
            longest[entry.name] = max(longest[entry.name], len(tree))
            entry.contender.committed((), [token])
    assert longest.keys() == {"prompt-lookup", "suffix", "sglang", "adapld", "recall", "prompt", "recall+prompt"}
    assert min(longest.values()) >= 2


class TwoPlanner(Planner):
    """Plans at most two nodes."""

    def plan_fixed(self, candidates: Sequence[Candidates], limits: Limits) -> Plan:
        return super().plan_fixed(candidates, replace(limits, max_nodes=2))


class TwoLoop(DecodeLoop):
    @classmethod
    def planner(cls, cost: CostCurve) -> Planner:
        return TwoPlanner(cost)


def test_a_loop_of_another_package_plans_all_our_trees(names: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precedent.decoding.loop.load_plugin", lambda group, name: {"two": TwoLoop}.get(name))
    usual, found = rows(names, pool="online"), found_in(names, pool="online", loop="two", ablate=("recall",))
    two = {row["name"]: row for row in found["drafters"]}
    for name in ("recall", "prompt", "recall+prompt", "without recall"):
        assert 0.0 < two[name]["draft_tokens_per_step"] <= 2.0
    assert usual["recall+prompt"]["draft_tokens_per_step"] > 2.0
    assert usual["suffix"]["tokens_per_step"] == two["suffix"]["tokens_per_step"]
    assert found["settings"]["loop"] == "two"


def test_the_accepted_path_is_the_longest_along_the_answer() -> None:
    """An end token in the tree is accepted like any other; nothing behind it can be."""
    assert accepted_path(chain([1, 2, 3]), [1, 2, 3]) == [0, 1, 2]
    assert accepted_path(chain([1, 2, 3, 4]), [1, 2, 3]) == [0, 1, 2]
    builder = TreeBuilder()
    builder.add_fixed_tree([5, 1, 2], [-1, -1, 1], [("x",)] * 3)
    assert accepted_path(builder.build(), [1, 2, 9]) == [1, 2]
    assert accepted_path(builder.build(), [7, 2, 9]) == []


def test_a_contender_never_hears_how_long_the_answer_is() -> None:
    """The same trees are proposed for an answer and for its beginning, up to the last token of the beginning."""
    answer, nodes = (1, 2, 3, 4, 5, 6, 7), []
    for length in (4, 7):
        report = Report()
        replay_turn(Turn((9,), answer[:length]), SuffixDecoding(pool_of(answer), 4.0, 8), report)
        nodes.append(next(report.text.widths.elements()))
    assert nodes[0] == nodes[1]


def test_the_ratio_is_to_the_best_baseline_that_verifies_no_more_nodes() -> None:
    settings = Settings(drafters=("prompt",), alphas=(1.0, 2.0), baselines=("suffix-tree",))
    entries = lineup(Pool(), settings, 0)
    figures = {
        "prompt-lookup": (2, 5),
        "suffix": (4, 10),
        "suffix-2": (9, 30),
        "suffix-tree": (3, 9),
        "prompt": (6, 12),
    }
    reports = {
        name: Report(text=Tally(tokens=tokens, widths=Counter({nodes: 1}))) for name, (tokens, nodes) in figures.items()
    }
    row = Replay(settings, entries, reports).as_dict()["drafters"][-1]
    assert (row["best_baseline"], row["ratio"], row["best_baseline_text"]) == ("suffix", 1.5, "suffix")
    assert row["ratio_tool_calls"] is None
    for nodes, best in (([29], "suffix"), ([29, 30], "suffix-2")):  # 30 nodes are up to 3 % more
        reports["prompt"].text.widths = Counter(nodes)
        assert Replay(settings, entries, reports).as_dict()["drafters"][-1]["best_baseline"] == best
    reports["prompt"].text.widths = Counter({3: 1})
    assert Replay(settings, entries, reports).as_dict()["drafters"][-1]["ratio"] is None


def test_every_idea_can_be_left_out_and_costs_where_it_counts(names: Path) -> None:
    """Names differ, so alignment counts; a run may repeat, so the same prompt counts."""
    found = rows(names, pool="same-task", ablate=tuple(IDEAS), budgets=(16,))
    left = {idea: found[f"without {idea}"]["left"] for idea in IDEAS}
    assert left["anchors"] < 0.97
    assert left["holes"] < 0.99
    assert left["calibration"] != 1.0 != left["trust"]
    repeats = [found[name]["kinds"]["exact_repeats"]["tokens_per_step"] for name in ("without exact", "recall+prompt")]
    assert repeats[0] < repeats[1]


@pytest.mark.parametrize(
    ("settings", "names_it"),
    [
        ({"ablate": ("luck",)}, "no part to leave out 'luck'; choose one of similarity, .*recall"),
        ({"baselines": ("eagle",)}, "no further baseline 'eagle'"),
        ({"pool": "sea"}, "no pool 'sea'"),
        ({"alphas": (0.0,)}, "alpha"),
        ({"loop": "four"}, "loop='four' is not installed"),
        ({"loop": "four", "ablate": ("recall", "trust")}, "trust cannot be left out of the planner of loop 'four'"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(settings: dict[str, Any], names_it: str) -> None:
    with pytest.raises(ConfigError, match=names_it):
        Settings(**settings)


# What it says

STEPS = MeasuredSteps("my-model (bfloat16, cpu, 2 threads)", {1: 20.0, 8: 20.0, 32: 50.0}, 0.02)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many conversations in which only a number differs."""
    runs = (conversation(f"where is {n}?", n, f"your order {n} is on its way to you") for n in range(30))
    return written(tmp_path_factory.mktemp("log") / "log.jsonl", *runs)


def test_the_verdict_compares_with_prompt_lookup_and_the_best_baseline(many: Path) -> None:
    found = found_in(many, similar=False)
    (row,) = [row for row in found["drafters"] if row["main"]]
    row |= {"tokens_per_step": 4.1234, "ratio": 1.0567, "best_baseline": "suffix"}
    found["drafters"][0]["tokens_per_step"] = 2.17
    assert verdict(found) == (
        "Your log: 4.1 tokens per step, 1.9 times what prompt lookup reaches, 6 % above the best baseline that "
        "verifies no more (suffix). How much faster that is depends on what a step costs; --target MODEL measures it "
        "on this machine."
    )
    for ratio, words in ((0.9, "10 % below the best baseline"), (1.001, "as much as the best baseline")):
        row["ratio"] = ratio
        assert words in verdict(found)
    row["ratio"] = None
    assert "baseline" not in verdict(found)


@pytest.mark.parametrize(("busy", "told"), [(BUSY_SHARE, True), (BUSY_SHARE + 0.01, False), (None, True)])
def test_speed_is_that_of_measured_steps_on_a_machine_that_rested(many: Path, busy: float | None, told: bool) -> None:
    steps = MeasuredSteps(STEPS.model, STEPS.milliseconds, busy)
    found = found_in(many, similar=False, limit=FEWEST_TURNS - (not told), measured=steps, curves=(MEASURED,))
    (row,) = [row for row in found["drafters"] if row["main"]]
    assert row["curve"] == MEASURED, "the trees were planned for this machine"
    assert found["settings"]["measured"]["step_milliseconds_by_width"] == {1: 20.0, 8: 20.0, 32: 50.0}
    says = verdict(found)
    assert (f"about {row['speed_on_this_machine']:.1f} times as fast on this machine" in says) == told
    assert (STEPS.model in says) == told
    assert ("take it as a hint" in says) == (found["turns"] < FEWEST_TURNS)


# The command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer, as transformers loads them."""
    return saved(tmp_path_factory.mktemp("model"), tiny_causal_lm(dtype=torch.float32))


def test_the_command_prints_a_table_and_writes_its_files(log: Path, model: Path, tmp_path: Path) -> None:
    """JSON with the keys of the contract, a page with colours, and the calibration."""
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    words = (log, "--tokenizer", model, "--embedder", "none", "--baselines", "suffix-tree")
    result = invoke(*words, "--json", out, "--html", page, "--calibration")
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert {"turns", "tokens", "drafters", "calibration"} <= found.keys()
    names = [row["name"] for row in found["drafters"]]
    assert names == ["prompt-lookup", "suffix", "suffix-tree", "recall", "prompt", "recall+prompt"]
    contract = {"name", "tokens_per_step", "tokens_per_step_tool_calls", "tokens_per_step_text"}
    assert contract | {"draft_tokens_per_step", "microseconds_per_step"} <= found["drafters"][0].keys()
    assert "Brier" in result.output
    assert f'<span style="background:{SOURCES["recall"].page}" title="recall">' in page.read_text()


def test_the_command_measures_chosen_customers_and_every_ablation(names: Path, model: Path, tmp_path: Path) -> None:
    out, splits = tmp_path / "out.json", tmp_path / "splits.json"
    splits.write_text(json.dumps({"rule": "by name", "test": ["ada", "dan"], "train": ["bob"]}))
    common = (names, "--tokenizer", model, "--embedder", "none", "--groups", splits)
    result = invoke(
        *common, "--split", "test", "--budget", "8,16", "--alpha", "1,4", "--curve", "flat,cpu", "--ablate", "all",
        "--details", "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["turns"] == 3  # ada twice
    assert {"suffix-4 @8", "without holes @16", "without recall @8"} <= {row["name"] for row in found["drafters"]}
    for title in ("by kind of turn", "left out", "nodes/", "p99", "Answers found word for word in the pool"):
        assert title in result.output
    assert "--split: test, train" in str(invoke(*common).exception)


def test_the_command_ends_with_the_verdict_and_hides_what_research_needs(many: Path, model: Path) -> None:
    words = (many, "--embedder", "none", "--limit", 8)
    short = invoke(*words, "--tokenizer", model).stdout
    assert short.rstrip().splitlines()[-1].startswith("Your log: ")
    assert "nodes" not in short.split("\n* ")[0]
    timed = invoke(*words, "--target", model)
    assert timed.exit_code == 0, timed.output
    assert str(model) in timed.stdout.rstrip().splitlines()[-1] or "cannot be said" in timed.stdout
    assert "give --target as well" in str(invoke(*words, "--tokenizer", model, "--dtype", "float32").exception)
