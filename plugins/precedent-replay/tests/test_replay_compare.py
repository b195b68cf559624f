"""How a replay compares: equal nodes, ideas left out, baselines of other packages, pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers.replayed import rows, written
from typer.testing import CliRunner

from precedent.cli.app import app
from precedent.errors import ConfigError
from precedent.pages.colours import Palette
from precedent.pages.tree_picture import SeenTree, tree_svg
from precedent.tree import CandidateTree, TreeBuilder, chain
from precedent_replay.ablation import IDEAS
from precedent_replay.baselines import SuffixDecoding
from precedent_replay.lineup import Entry, lineup
from precedent_replay.pool import Answer, Pool
from precedent_replay.results import Replay
from precedent_replay.run import Settings, replay
from precedent_replay.simulate import Report, Tally, replay_turn
from precedent_replay.turns import Turn
from precedent_testing.tiny_models import byte_tokenizer

NAMES = ("ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hana")


def record(name: str, order: int) -> dict[str, object]:
    """A run in which only the name differs, three times in the answer."""
    answer = (
        f"dear {name}, your parcel has left our house; {name}, we thank you for waiting. goodbye {name} and be well"
    )
    messages = [
        {"role": "user", "content": f"where is the parcel of {name}?"},
        {"role": "assistant", "content": answer},
    ]
    return {"task_id": name, "order": order, "messages": messages}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Runs that differ in a name, the first two of them twice."""
    return written(tmp_path / "log.jsonl", [record(name, n) for n, name in enumerate((*NAMES, *NAMES[:2]))])


def turn(prompt: Sequence[int], answer: Sequence[int] = ()) -> Turn:
    """A turn of bare ids."""
    return Turn(0, "t", "g", tuple(prompt), tuple(answer), "", False, "")


def pool_of(*answers: Sequence[int]) -> Pool:
    """A pool of bare ids."""
    pool = Pool(None)
    for number, answer in enumerate(answers):
        pool.add(Answer(number, "g", tuple(answer), "", ""))
    return pool


def test_the_ratio_is_to_the_best_baseline_that_verifies_no_more_nodes() -> None:
    """A baseline with more tokens but more nodes does not count; with none left there is no ratio."""
    ours = next(entry for entry in lineup(Pool(None), Settings(drafters=("prompt",)), 0) if not entry.baseline)
    steps = {"small": (20, 40), "best": (30, 80), "wide": (60, 200), ours.name: (45, 90)}
    reports = {
        name: Report(text=Tally(turns=1, tokens=tokens, steps=10, nodes=nodes))
        for name, (tokens, nodes) in steps.items()
    }
    result = Replay(Settings(), [*(Entry(name, None) for name in ("small", "best", "wide")), ours], reports)  # type: ignore[arg-type]  # nobody drafts
    row = result.as_dict()["drafters"][-1]
    assert (row["best_baseline"], row["ratio"], row["best_baseline_text"]) == ("best", 1.5, "best")
    assert row["ratio_tool_calls"] is None
    reports[ours.name].text.nodes = 30
    assert result.as_dict()["drafters"][-1]["ratio"] is None


def test_every_idea_can_be_left_out_and_costs_where_it_counts(log: Path) -> None:
    """Names differ, so alignment counts; a run may repeat, so the same prompt counts."""
    found = rows(log, pool="same-task", ablate=tuple(IDEAS), budgets=(24,))
    left = {idea: found[f"without {idea}"]["left"] for idea in IDEAS}
    assert left["anchors"] < 0.97
    assert left["holes"] < 0.99
    assert left["calibration"] != 1.0
    assert left["trust"] != 1.0
    assert (
        found["without exact"]["kinds"]["exact_repeats"]["tokens_per_step"]
        < (found["recall+prompt"]["kinds"]["exact_repeats"]["tokens_per_step"])
    )


ANSWERS = {
    "cancel": "gone and refunded",
    "deliver": "on its way now",
    "exchange": "swapped for blue",
    "pay": "bill is settled",
}


def test_without_similarity_nothing_is_near(tmp_path: Path) -> None:
    """Four kinds of request with answers of their own: only similarity knows how this one begins."""
    asked = [[*ANSWERS][n % 4] for n in range(32)]
    messages = [
        [{"role": "user", "content": f"{kind} please, number {n}"}, {"role": "assistant", "content": ANSWERS[kind]}]
        for n, kind in enumerate(asked)
    ]
    log = written(tmp_path / "log.jsonl", [{"messages": each} for each in messages])
    found = rows(log, ablate=("similarity",), budgets=(4,), drafters=("recall",))
    assert found["without similarity"]["left"] < 0.97


def test_what_does_not_exist_is_refused_by_name(log: Path) -> None:
    for settings, said in (
        ({"ablate": ("luck",)}, "cannot leave out 'luck'; choose one of similarity, .*recall"),
        ({"baselines": ("eagle",)}, "no further baseline 'eagle'"),
        ({"alphas": (0.0,)}, "alpha"),
    ):
        with pytest.raises(ConfigError, match=said):
            rows(log, **settings)


def test_answers_that_stand_in_the_pool_are_counted_and_measured_apart(log: Path) -> None:
    result = replay([log], [], byte_tokenizer(), None, Settings())
    assert result.as_dict()["exact_repeats"] == 2
    assert result.reports["recall+prompt"].repeats.turns == 2
    assert (
        result.reports["recall+prompt"].repeats.tokens_per_step > result.reports["recall+prompt"].text.tokens_per_step
    )
    pool = pool_of([1, 2], [1, 2], [3])
    pool.hide([1])
    assert [pool.holds(ids) for ids in ((1, 2), (3,), (4,))] == [True, True, False]
    pool.hide([2])
    assert not pool.holds((1, 2))


def test_a_contender_never_hears_how_long_the_answer_is() -> None:
    """The same trees are proposed for an answer and for its beginning, up to the last token of the beginning."""
    answer = [1, 2, 3, 4, 5, 6, 7]
    nodes = []
    for length in (4, 7):
        report = Report()
        replay_turn(turn([9], answer[:length]), SuffixDecoding(pool_of(answer), 4.0, 8), report)
        nodes.append(next(report.text.widths.elements()))
    assert nodes[0] == nodes[1]


def forked_tree() -> CandidateTree:
    """Two branches of two sources, one of them long."""
    builder = TreeBuilder()
    tokens, parents = [10, 11, 12, 13, 14, 20, 21, 30], [-1, 0, 1, 2, 3, -1, 5, 1]
    builder.add_fixed_tree(tokens, parents, [("recall",)] * 5 + [("prompt",)] * 3)
    return builder.build()


def test_the_picture_of_a_tree_shows_every_run_and_what_was_accepted() -> None:
    tree = forked_tree()
    order = {token: node for node, token in enumerate(tree.token_ids)}
    path = tuple(order[token] for token in (10, 11, 12))
    seen = SeenTree(tree, path, (1, 2), (0.9,) * len(tree))
    assert seen.interest > 0 == SeenTree(chain([1, 2, 3], "x"), (0, 1, 2), (1,), (0.9,) * 3).interest
    picture = tree_svg(seen, lambda ids: "<" + " ".join(map(str, ids)) + ">", Palette())
    texts = [each.text for each in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"<10·11>", "<12>", "<13·14>", "<20·21>", "<30>"} <= set(texts)
    assert "0.81" in texts
    assert any("accepted, 3 of 8 nodes" in (text or "") for text in texts)
    assert picture.count('stroke="#222"') == 3 + 2  # the root's box and two runs, and the two lines between them


def invoke(*words: str) -> Any:
    """Run the command."""
    return CliRunner().invoke(app, ["replay", *words])


def test_the_command_measures_chosen_customers_and_every_ablation(log: Path, tmp_path: Path) -> None:
    folder, out, splits = tmp_path / "tokenizer", tmp_path / "out.json", tmp_path / "splits.json"
    byte_tokenizer().save_pretrained(folder)
    splits.write_text(json.dumps({"rule": "by name", "test": ["ada", "dan"], "train": ["bob"]}))
    common = (str(log), "--tokenizer", str(folder), "--embedder", "none", "--groups", str(splits))
    result = invoke(
        *common, "--split", "test", "--budget", "8,16", "--alpha", "1,4", "--curve", "flat,cpu", "--ablate", "all",
        "--details", "--json", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["turns"] == 3  # ada twice
    assert {"suffix-4 @8", "without holes @16", "without recall @8"} <= {row["name"] for row in found["drafters"]}
    for title in ("by kind of turn", "left out", "Answers found word for word in the pool"):
        assert title in result.output
    refused = invoke(*common)
    assert isinstance(refused.exception, ConfigError)
    assert "--split: test, train" in str(refused.exception)
