"""Candidate trees against single paths on recorded runs: at equal numbers of rows, and at given step times.

    python benchmarks/bench_branches.py TRACES.jsonl.gz … [--rows 2 4 8 16 32] [--limit 300] [--json FILE]

Recorded answers count as the target's output, and a file's earlier answers are the memory (`precedent replay`, pool
`online`). Every fourth conversation is measured, until there are `--limit` answers. `budgets` ignore step times: trees
of at most so many rows, paths of at most so many, and `equal`: trees that in no step have more rows than the best path.
`costs` are the planner's choices at the step times of llama.cpp and of our kernels in `docs/figures/gguf-amx.json`, in
straight lines between the measured rows, and of an assumed accelerator. `times` is how many times as many tokens as
paths the others bring in the same time (budgets: steps), with its 95 % bootstrap interval over conversations. Drafting
takes no time.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from measuring import ROOT, options, run
from precedent.cache import SentenceTransformerEmbedder
from precedent.cache.embedder import default_model
from precedent.drafters import Candidates, DrafterParts, load_drafters
from precedent.drafters.base import DrawSource
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Limits, Plan, Planner
from precedent.runtime.background import AtOnce
from precedent.target.load.loading import load_tokenizer
from precedent.target.load.source import packaged_file
from precedent.text.traces import read_trajectories
from precedent_replay.contenders import Drafted
from precedent_replay.pool import Pool, embedded
from precedent_replay.results import Report, Tally, replay_turn
from precedent_replay.turns import Turn, TurnReader

TREES, EQUAL, PATHS = "trees", "equal", "paths"
FLAT, ACCELERATOR = {1: 1.0}, {1: 10.0, 8: 10.0, 16: 13.0}
CANDIDATES, MOST_ROWS, EVERY, RESAMPLES = 64, 33, 4, 2000
"""Nodes that each drafter proposes to the planner; rows of a step with the engine's default limit of 32 nodes."""

Costs = Mapping[int, float]


class Bounded(Planner):
    """Plans trees or single paths of at most so many rows."""

    def __init__(self, costs: Costs, rows: int, shape: str) -> None:
        super().__init__(CostCurve.through(costs))
        self._nodes, self._shape = rows - 1, shape

    def plan(self, candidates: Sequence[Candidates], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        limits = replace(limits, max_nodes=self._nodes, one_path=self._shape != TREES)
        if self._shape == EQUAL:
            path = self.plan_fixed(candidates, limits).choice
            limits = replace(limits, max_nodes=0 if path is None else path.token_ids.size, one_path=False)
        return super().plan(candidates, draw_sources, limits)


def measure(given: Namespace) -> dict[str, Any]:
    files = json.loads((ROOT / "docs" / "figures" / "gguf-amx.json").read_text(encoding="utf-8"))["figures"]
    kinds = [(way, name) for way in ("llama.cpp", "ours") for name in ("1b", "smollm2")]
    costs = {f"{way} {name}": {row["rows"]: row[way] for row in files[name]["rows"]} for way, name in kinds}
    return {
        file.name.split(".")[0]: replayed(file, costs | {"accelerator": ACCELERATOR}, given.rows, given.limit)
        for file in given.traces
    }


def replayed(traces: Path, costs: Mapping[str, Costs], budgets: Sequence[int], limit: int) -> dict[str, Any]:
    """Play one file's conversations through all planners."""
    reader, pool = TurnReader(load_tokenizer(packaged_file())), Pool()
    conversations = list(read(traces, reader, limit))
    measured = conversations[EVERY - 1 :: EVERY]
    if not any(measured):
        raise SystemExit(f"{traces.name}: expected answers in every fourth conversation of a log, got none")
    queries = (turn.query for turns in conversations for turn in turns)
    pool.vectors = embedded(queries, SentenceTransformerEmbedder(default_model()), lambda what, done: None)
    parts = DrafterParts(tokenizer_fingerprint="", executor=AtOnce(), cache=pool, draft_model=None)  # type: ignore[arg-type]  # has what recall needs
    drafters = load_drafters(["recall", "prompt"], parts)
    planners = {(rows, shape): Bounded(FLAT, rows, shape) for rows in budgets for shape in (TREES, EQUAL, PATHS)}
    planners |= {(name, shape): Bounded(costs[name], MOST_ROWS, shape) for name in costs for shape in (TREES, PATHS)}
    ours = {key: Drafted("", drafters, planner, CANDIDATES, reader.end_token_id) for key, planner in planners.items()}
    tallies: dict[Any, dict[str, list[Tally]]] = {key: {} for key, _ in ours}
    for number, answers in enumerate(conversations, start=1):
        for (key, shape), contender in ours.items() if number % EVERY == 0 else ():
            report = Report()
            for turn in answers:
                replay_turn(turn, contender, report)
            tallies[key].setdefault(shape, []).append(report.all)
        for turn in answers:
            pool.add(turn.completion)
    found: dict[str, Any] = {"conversations": len(measured), "answers": sum(map(len, measured))}
    found["budgets"] = {rows: compared(tallies[rows], FLAT) for rows in budgets}
    found["costs"] = {name: compared(tallies[name], costs[name]) for name in costs}
    found["budgets_at_costs"] = {
        name: {
            rows: {shape: one["against_plain"] for shape, one in compared(tallies[rows], costs[name]).items()}
            for rows in budgets
        }
        for name in costs
    }
    for name, one in (found["budgets"] | found["costs"]).items():
        print(f"{traces.name}, {name if name in costs else f'at most {name} rows'}: {shown(one)}", flush=True)
    return found


def read(traces: Path, reader: TurnReader, limit: int) -> Iterator[list[Turn]]:
    """The conversations up to the last one that is measured."""
    measured = 0
    for number, (_, runs) in enumerate(groupby(read_trajectories([traces]), key=lambda run: run.number), start=1):
        turns = [turn for run in runs for turn in reader.turns(run)]
        yield turns
        measured += len(turns) * (number % EVERY == 0)
        if measured >= limit:
            return


def compared(tallies: Mapping[str, list[Tally]], costs: Costs) -> dict[str, Any]:
    """The figures of each shape, and those of trees against paths."""
    table, found = CostCurve.through(costs).table, dict[str, Any]()
    spent = {
        shape: np.array([sum(table[width] * steps for width, steps in one.widths.items()) for one in played])
        for shape, played in tallies.items()
    }
    count = len(spent[PATHS])
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    for shape, played in tallies.items():
        whole = Tally()
        for one in played:
            whole.add(one)
        found[shape] = {"tokens_per_step": whole.tokens_per_step, "rows_per_step": 1 + whole.nodes_per_step}
        if costs is not FLAT:
            found[shape] |= {"against_plain": whole.speed(table / table[0])}
            found[shape]["tokens_per_second"] = found[shape]["against_plain"] * 1e3 / costs[1]
        if shape != PATHS:
            low, high = np.quantile((drawn @ spent[PATHS]) / (drawn @ spent[shape]), (0.025, 0.975)).tolist()
            found[shape] |= {"times": float(spent[PATHS].sum() / spent[shape].sum()), "low": low, "high": high}
    return found


def shown(found: Mapping[str, Any]) -> str:
    """One line of text."""
    parts = list[str]()
    for shape, one in found.items():
        parts.append(f"{shape} {one['tokens_per_step']:.2f} tokens, {one['rows_per_step']:.2f} rows a step")
        if "against_plain" in one:
            parts.append(f"{one['tokens_per_second']:.1f}/s, {one['against_plain']:.2f}x plain")
        if "times" in one:
            parts.append(f"{one['times']:.3f}x paths ({one['low']:.3f} to {one['high']:.3f})")
    return ", ".join(parts)


if __name__ == "__main__":
    parser = options(__doc__, rows=[2, 4, 8, 16, 32], limit=300)
    parser.add_argument("traces", nargs="+", type=Path)
    run(parser, measure)
