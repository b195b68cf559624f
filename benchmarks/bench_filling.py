"""Tokens per step while the cache fills: recorded conversations in their order, each drafting from those before it.

    python benchmarks/bench_filling.py TRACES.jsonl.gz [--json FILE]

Recorded answers count as the target's output (`precedent replay`, trees of at most 32 nodes, pool `online`) and are
stored when their conversation ends. `sizes` has tokens per step, with the cache and without it, by the number of
completions in the cache, from one size up to the next.
"""

from __future__ import annotations

from argparse import Namespace
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from measuring import options, run
from precedent.cache import SentenceTransformerEmbedder
from precedent.cache.embedder import default_model
from precedent.target.load.loading import load_tokenizer
from precedent.target.load.source import packaged_file
from precedent.text.traces import read_trajectories
from precedent_replay.contenders import lineup
from precedent_replay.pool import Pool, embedded
from precedent_replay.results import Report, replay_turn
from precedent_replay.settings import Settings
from precedent_replay.turns import Turn, TurnReader

SIZES = (0, 50, 100, 200, 400, 800, 1600)
WAYS = {"recall+prompt": "with", "prompt": "without"}


def measure(given: Namespace) -> dict[str, Any]:
    reader, pool = TurnReader(load_tokenizer(packaged_file())), Pool()
    queries = (turn.query for turns in conversations(given.traces, reader) for turn in turns)
    pool.vectors = embedded(queries, SentenceTransformerEmbedder(default_model()), told)
    contenders = [entry.contender for entry in lineup(pool, Settings(baselines=()), reader.end_token_id)]
    reports = [{way: Report() for way in WAYS} for _ in SIZES]
    played_conversations = stored = 0
    for turns in conversations(given.traces, reader):
        played = reports[bisect_right(SIZES, stored) - 1]
        for turn in turns:
            for contender in contenders:
                if contender.name in WAYS:
                    replay_turn(turn, contender, played[contender.name])
        for turn in turns:
            pool.add(turn.completion)
        played_conversations, stored = played_conversations + 1, stored + len(turns)
        told("stored", stored)
    sizes = [
        {"completions": size, "answers": played["prompt"].all.turns}
        | {f"{ending} the cache": played[way].all.tokens_per_step for way, ending in WAYS.items()}
        for size, played in zip(SIZES, reports, strict=True)
    ]
    return {"conversations": played_conversations, "completions": stored, "sizes": sizes}


def conversations(traces: Path, reader: TurnReader) -> Iterator[list[Turn]]:
    for _, runs in groupby(read_trajectories([traces]), key=lambda one: one.number):
        yield [turn for one in runs for turn in reader.turns(one)]


def told(what: str, done: int) -> None:
    print(f"\r{what} {done:,}", end="", flush=True)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("traces", type=Path)
    run(parser, measure)
