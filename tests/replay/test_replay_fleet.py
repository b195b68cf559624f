"""A simulated fleet: one replica is what `replay` measures, and routing, staleness and memory do what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from precedent.cli.app import app
from precedent.errors import ConfigError
from precedent.replay.fleet import ROUTINGS, Fleet, simulate
from precedent.replay.replicas import common
from precedent.replay.run import Settings, replay
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer

SETTINGS = Settings(drafters=("recall", "prompt"), budgets=(16,))
MEASURED = ("tokens_per_step", "draft_tokens_per_step", "accepted_by_source", "kinds", "tokens_per_step_tool_calls")


def run(task: str, group: str, *answers: str) -> dict[str, object]:
    messages: list[dict[str, object]] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": task}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "thanks"}]
    return {"task_id": task, "group": group, "messages": messages}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve groups, each of which asks four times; the answers of a group resemble each other alone."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    words = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "ledge"]
    runs = [
        run(
            f"what of the {word} {time}",
            word,
            *(f"the {word} order {time} went by {word} road, part {n}" for n in range(3)),
        )
        for time in range(4)
        for word in words
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in runs))
    return path


def simulated(log: Path, fleet: Fleet, settings: Settings = SETTINGS, warm: tuple[Path, ...] = ()) -> dict[str, Any]:
    return simulate([log], warm, byte_tokenizer(), HashEmbedder(), settings, fleet).as_dict()


def tokens_per_step(found: dict[str, Any]) -> float:
    return float(found["drafters"][-1]["tokens_per_step"])


@pytest.mark.parametrize("limit", [None, 40])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("warmed", [False, True])
def test_one_replica_is_a_replay(log: Path, routing: str, limit: int | None, warmed: bool) -> None:
    """Every figure but the times, for every drafter set."""
    settings, warm = replace(SETTINGS, limit=limit), (log,) if warmed else ()
    plain = replay([log], warm, byte_tokenizer(), HashEmbedder(), settings).as_dict()
    found = simulated(log, Fleet(routing=routing, staleness=5), settings, warm)
    ours = [row for row in plain["drafters"] if not row["baseline"]]
    assert [{name: row[name] for name in ("name", *MEASURED)} for row in found["drafters"]] == [
        {name: row[name] for name in ("name", *MEASURED)} for row in ours
    ]
    assert (found["turns"], found["tokens"]) == (plain["turns"], plain["tokens"])


def test_tenants_that_stay_together_lose_nothing_by_more_replicas(log: Path) -> None:
    """What a tenant's turns may see does not depend on the other tenants, wherever these are; planners differ."""
    alone = simulated(log, Fleet(tenants=12))
    spread = simulated(log, Fleet(replicas=100, tenants=12, staleness=1000))
    assert spread["replicas_used"] > 5
    assert spread["hit_rate"] == alone["hit_rate"] == 1.0
    assert spread["prefix_hit_rate"] == alone["prefix_hit_rate"]
    assert tokens_per_step(spread) == pytest.approx(tokens_per_step(alone), rel=0.05)


def test_without_a_shared_memory_random_replicas_forget_what_they_did_not_answer(log: Path) -> None:
    shared = simulated(log, Fleet(replicas=20, routing="random"))
    apart = simulated(log, Fleet(replicas=20, routing="random", staleness=10**6))
    assert tokens_per_step(apart) < 0.9 * tokens_per_step(shared)


def test_staleness_costs_random_routing_ever_more(log: Path) -> None:
    found = [tokens_per_step(simulated(log, Fleet(20, "random", staleness=runs))) for runs in (0, 12, 36, 10**6)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_a_bound_on_memory_hurts_those_who_hold_all_tenants(log: Path) -> None:
    """With as many tokens as two groups have, a replica that sees all of them finds none at hand."""
    small = {"tenants": 12, "memory_tokens": 700}
    together = simulated(log, Fleet(replicas=50, routing="tenant", **small))
    scattered = simulated(log, Fleet(replicas=50, routing="random", **small))
    assert together["hit_rate"] > scattered["hit_rate"] + 0.3


def test_the_oldest_completions_leave_a_memory_that_one_tenant_overfills(log: Path) -> None:
    full, small = (simulated(log, Fleet(memory_tokens=most)) for most in (None, 500))
    assert small["hit_rate"] == 1.0
    assert tokens_per_step(small) < tokens_per_step(full)


def test_a_conversation_finds_its_keys_and_values_where_it_stays(log: Path) -> None:
    shares = {routing: simulated(log, Fleet(40, routing, tenants=12))["prefix_hit_rate"] for routing in ROUTINGS}
    assert shares["prefix"] > shares["random"] + 0.2
    assert shares["tenant"] >= shares["prefix"]
    assert simulated(log, Fleet(kv_tokens=0))["prefix_hit_rate"] == 0


def test_what_two_sequences_share() -> None:
    def shared(one: list[int], other: list[int]) -> int:
        return common(np.array(one, dtype=np.int32), np.array(other, dtype=np.int32))

    assert [shared([], [1]), shared([1, 2], [1, 2, 3]), shared([1, 2, 4], [1, 2, 3]), shared([5], [6])] == [0, 2, 2, 0]


@pytest.mark.parametrize(
    "wrong",
    [{"replicas": 0}, {"routing": "hash"}, {"tenants": 0}, {"staleness": -1}, {"memory_tokens": 0}, {"kv_tokens": -1}],
)
def test_what_is_no_fleet_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Fleet(**wrong)


@pytest.mark.parametrize(
    "options",
    [
        ["--routing", "random"],
        ["--tenants", "3"],
        ["--staleness", "1"],
        ["--memory", "5"],
        ["--replicas", "2", "--pool", "none"],
        ["--replicas", "2", "--details"],
        ["--replicas", "2", "--budget", "8,16"],
        ["--replicas", "2", "--ablate", "all"],
        ["--replicas", "2", "--baselines", "suffix-tree"],
        ["--replicas", "0"],
    ],
)
def test_an_option_that_would_be_ignored_is_refused(log: Path, options: list[str]) -> None:
    done = CliRunner().invoke(app, ["replay", str(log), *options, "--embedder", "none"])
    assert isinstance(done.exception, ConfigError), done.output


def test_the_command_tells_what_it_found(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--replicas", "3", "--routing", "prefix", "--tenants", "2", "--memory", "9000", "--limit", "20"]
    done = CliRunner().invoke(app, ["replay", str(log), *options, "--embedder", "none", "--json", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["fleet"] | {"replicas": 3, "routing": "prefix", "tenants": 2, "memory_tokens": 9000} == found["fleet"]
    assert (found["turns"], found["replicas_used"] <= 3) == (20, True)
    assert "of 3 replicas, by prefix" in done.output.replace("\n", " ")
