"""The drafting service at a million cached tokens: time per row and per batch.

    python benchmarks/bench_service.py --tokens 1000000 --rows 1 4 16 32 64 [--drafters recall prompt] [--json FILE]

Every row follows an answer that shares passages with stored ones. A step is what the other engine waits for:
`committed` for every row, then one call of `chains`. Besides the time on the clock, the processor time of the calling
thread is reported, which other programs disturb less.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from measuring import options, run
from precedent.cache import Completion, SpeculationCache, SQLiteStore
from precedent.cache.backend import identity_of
from precedent.planning.costs import CostCurve
from precedent.text.codec import TokenizerCodec
from precedent_engines import DRAFTERS, DraftingService, DraftingSession
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

TENANT, QUERY, CHAIN, STEPS, PROMPT, LENGTH = "bench", "order 7 of a customer", 16, 400, 2000, 240
VOCABULARY, STORED_LENGTH, PASSAGES = 49_152, 60, 400
OWN = 0.08
"""Share of an answer's tokens that are in no stored answer."""

COST = {1: 20.0, 16: 24.0, 64: 40.0, 257: 130.0}
Answers = Sequence[list[int]]


def completions(num_tokens: int) -> list[list[int]]:
    """Make up answers of some 60 tokens: passages that others share, alternating with words of their own."""
    rng, answers = np.random.default_rng(7), list[list[int]]()
    passages = [(rng.zipf(1.3, rng.integers(5, 40)) % VOCABULARY).tolist() for _ in range(PASSAGES)]
    while num_tokens > 0:
        answer: list[int] = []
        while len(answer) < STORED_LENGTH:
            answer += passages[int(rng.zipf(1.5)) % PASSAGES] + (rng.zipf(1.3, 6) % VOCABULARY).tolist()
        answers.append(answer[: max(1, min(len(answer), num_tokens))])
        num_tokens -= len(answers[-1])
    return answers


def filled(folder: Path, answers: Answers, fingerprint: str) -> SpeculationCache:
    """Make a cache of these completions, as fast as it can be written."""
    embedder, store = HashEmbedder(), SQLiteStore.open(folder)
    store._database._writer.execute("PRAGMA synchronous=OFF")
    queries = [f"order {number} of a customer" for number in range(97)]
    vectors = embedder.embed(queries)
    for number, answer in enumerate(answers):
        query = number % len(queries)
        new = Completion(tuple(answer), fingerprint, "model", TENANT, queries[query])
        store.insert(new, vectors[query], identity_of(embedder))
    store.close()
    return SpeculationCache.open(folder, embedder=embedder)


class Rows:
    """Requests that run together, each along an answer of its own."""

    def __init__(self, service: DraftingService, stored: Answers, number: int) -> None:
        self.service, self.stored, self.rng, self.begun = service, stored, np.random.default_rng(number), 0
        self.rows: list[tuple[DraftingSession, list[int]]] = [self.begin() for _ in range(number)]
        self.drafted = self.accepted = 0

    def begin(self) -> tuple[DraftingSession, list[int]]:
        prompt, truth = self.text(PROMPT), self.text(LENGTH)
        own = self.rng.random(len(truth)) < OWN
        truth = np.where(own, self.rng.integers(0, 40_000, len(truth)), truth).tolist()
        self.begun += 1
        return self.service.begin(f"{id(self)}-{self.begun}", prompt, tenant=TENANT, query=QUERY), truth

    def text(self, least: int) -> list[int]:
        text: list[int] = []
        while len(text) < least:
            text += self.stored[int(self.rng.integers(len(self.stored)))]
        return text

    def step(self, drafts: list[list[int]]) -> tuple[float, float, list[list[int]]]:
        """Commit what agrees with the truth and one more token, and draft again; seconds on the clock and of work."""
        commits = []
        for number, ((session, truth), draft) in enumerate(zip(self.rows, drafts, strict=True)):
            wrong = (place for place, pair in enumerate(zip(draft, truth, strict=False)) if pair[0] != pair[1])
            right = next(wrong, len(draft))
            self.drafted, self.accepted = self.drafted + len(draft), self.accepted + right
            commits.append((session, truth[: right + 1]))
            self.rows[number] = session, truth[right + 1 :]
        clock, work = time.perf_counter(), time.thread_time()
        for session, tokens in commits:
            session.committed(tokens)
        drafts = self.service.chains([session for session, _ in commits], CHAIN)
        spent = time.perf_counter() - clock, time.thread_time() - work
        for number, (session, truth) in enumerate(self.rows):
            if not truth:
                session.end()
                self.rows[number], drafts[number] = self.begin(), []
        return *spent, drafts

    def run(self, steps: int) -> np.ndarray:
        """Microseconds of each step, on the clock and of work, `[steps, 2]`."""
        times, drafts = [], [list[int]() for _ in self.rows]
        for _ in range(steps):
            *spent, drafts = self.step(drafts)
            times.append(spent)
        return np.array(times) * 1e6


def bench(service: DraftingService, stored: Answers, number: int) -> dict[str, Any]:
    rows = Rows(service, stored, number)
    rows.run(50)
    rows.drafted = rows.accepted = 0
    times = rows.run(max(50, STEPS // max(1, number // 8)))
    for session, _ in rows.rows:
        session.end()
    (step, work), (p99, _) = np.percentile(times, [50, 99], axis=0).tolist()
    counts = {"drafted_a_row": rows.drafted, "accepted_a_row": rows.accepted}
    per_row = {name: count / len(times) / number for name, count in counts.items()}
    spent = {"step_us": step, "step_us_p99": p99, "step_work_us": work, "row_work_us": work / number}
    return {"rows": number, **spent, **per_row}


def measure(given: Namespace) -> dict[str, Any]:
    codec, answers = TokenizerCodec(byte_tokenizer()), completions(given.tokens)
    with tempfile.TemporaryDirectory(prefix="bench-service-") as folder:
        cache = filled(Path(folder), answers, codec.fingerprint)
        with DraftingService(cache, codec, tuple(given.drafters), cost=CostCurve.through(COST)) as service:
            warm = service.begin("first", [1, 2, 3], tenant=TENANT, query=QUERY)
            while not warm.chain(1) and "recall" in given.drafters:
                time.sleep(0.05)
            warm.end()
            rows = [bench(service, answers, number) for number in given.rows]
        cache.close()
    return {"tokens": given.tokens, "drafters": given.drafters, "rows": rows}


if __name__ == "__main__":
    run(options(__doc__, tokens=1_000_000, rows=[1, 4, 16, 32, 64], drafters=list(DRAFTERS)), measure)
