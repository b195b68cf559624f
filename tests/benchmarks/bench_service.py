"""The drafting service at a million cached tokens: time per row and per batch, of importing and of beginning.

    python tests/benchmarks/bench_service.py --tokens 1000000 --rows 1 4 16 32 64 [--json FILE]

Completions are made up as in `bench_index.py`. Every row follows an answer that shares passages with stored ones. A
step is what the other engine waits for: `committed` for every row, then one call of `chains`. Beside the time on the
clock stands the processor time of the calling thread, which other programs on the machine disturb less. `recall` alone,
without prompt and prediction, shows what each drafter adds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_index import completions
from measurement import Measurement, json_option

from precedent.cache import NewCompletion, SpeculationCache, SQLiteStore
from precedent.cache.backend import identity_of
from precedent.planning.costs import CostCurve
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer
from precedent.text.codec import TokenizerCodec
from precedent_engines import DRAFTERS, DraftingService, DraftingSession

TENANT, CHAIN, STEPS, PROMPT, LENGTH = "bench", 16, 400, 2000, 240
OWN = 0.08
"""Share of an answer's tokens that are its own and stand in no stored answer."""

COST = {1: 20.0, 16: 24.0, 64: 40.0, 257: 130.0}
Answers = Sequence[list[int]]


def filled(folder: Path, answers: Answers, fingerprint: str) -> SpeculationCache:
    """A cache with these completions, as fast as it can be written."""
    embedder = HashEmbedder()
    store = SQLiteStore.open(folder)
    store._database._writer.execute("PRAGMA synchronous=OFF")
    queries = [f"order {number} of a customer" for number in range(97)]
    vectors = embedder.embed(queries)
    for number, answer in enumerate(answers):
        query = number % len(queries)
        new = NewCompletion(tuple(answer), fingerprint, "model", TENANT, queries[query])
        store.insert(new, vectors[query], identity_of(embedder))
    store.close()
    return SpeculationCache.open(folder, embedder=embedder)


class Rows:
    """Requests that run together, each along an answer of its own."""

    def __init__(self, service: DraftingService, stored: Answers, number: int, **asked: Any) -> None:
        self._service, self._rng, self._asked = service, np.random.default_rng(number), asked
        self._stored = stored
        self._begun, self.beginning = 0, list[float]()
        self.rows: list[tuple[DraftingSession, list[int]]] = [self._begin() for _ in range(number)]
        self.drafted = self.accepted = self.committed = 0

    def _begin(self) -> tuple[DraftingSession, list[int]]:
        prompt, truth = self._text(PROMPT), self._text(LENGTH)
        own = self._rng.random(len(truth)) < OWN
        truth = np.where(own, self._rng.integers(0, 40_000, len(truth)), truth).tolist()
        self._begun += 1
        started = time.perf_counter()
        session = self._service.begin(f"{id(self)}-{self._begun}", prompt, tenant=TENANT, **self._asked)
        self.beginning.append((time.perf_counter() - started) * 1e3)
        return session, truth

    def _text(self, least: int) -> list[int]:
        """Stored answers in a row, of at least so many tokens."""
        text: list[int] = []
        while len(text) < least:
            text += self._stored[int(self._rng.integers(len(self._stored)))]
        return text

    def step(self, drafts: Sequence[Sequence[int]]) -> tuple[float, float, list[list[int]]]:
        """Commit what agrees with the truth and one token more, and draft again; seconds on the clock and of work."""
        commits = []
        for number, ((session, truth), draft) in enumerate(zip(self.rows, drafts, strict=True)):
            right = next(
                (n for n, pair in enumerate(zip(draft, truth, strict=False)) if pair[0] != pair[1]), len(draft)
            )
            self.drafted, self.accepted = self.drafted + len(draft), self.accepted + right
            commits.append((session, truth[: right + 1]))
            self.rows[number] = session, truth[right + 1 :]
        sessions = [session for session, _ in commits]
        clock, work = time.perf_counter(), time.thread_time()
        for session, tokens in commits:
            session.committed(tokens)
        drafts = self._service.chains(sessions, CHAIN)
        spent = time.perf_counter() - clock, time.thread_time() - work
        self.committed += sum(len(tokens) for _, tokens in commits)
        for number, (session, truth) in enumerate(self.rows):
            if not truth:
                session.end()
                self.rows[number], drafts[number] = self._begin(), []
        return *spent, drafts

    def run(self, steps: int) -> np.ndarray:
        """Microseconds of each step, on the clock and of work, `[steps, 2]`."""
        times, drafts = [], [list[int]() for _ in self.rows]
        for _ in range(steps):
            clock, work, drafts = self.step(drafts)
            times.append((clock * 1e6, work * 1e6))
        return np.array(times)

    def end(self) -> None:
        for session, _ in self.rows:
            session.end()


def bench(service: DraftingService, stored: Answers, number: int, what: str) -> dict[str, Any]:
    """One batch size's figures, printed."""
    rows = Rows(service, stored, number, query="order 7 of a customer")
    rows.run(50)
    times = rows.run(max(50, STEPS // max(1, number // 8)))
    rows.end()
    (p50, work50), (p99, _) = np.percentile(times, 50, axis=0), np.percentile(times, 99, axis=0)
    drafted, accepted = (total / len(times) / number for total in (rows.drafted, rows.accepted))
    print(
        f"{what:<28} {number:>3} rows: {p50:8.0f} µs a step (p99 {p99:6.0f}, work {work50:6.0f}), "
        f"{p50 / number:6.1f} µs a row (work {work50 / number:6.1f}); "
        f"{drafted:4.1f} drafted, {accepted:4.1f} accepted a row",
        flush=True,
    )
    step = {"step_us": p50, "step_us_p99": p99, "step_work_us": work50, "row_work_us": work50 / number}
    return {"drafters": what, "rows": number, **step, "drafted_a_row": drafted, "accepted_a_row": accepted}


def import_seconds() -> tuple[float, float]:
    """Seconds on the clock and of work that importing the service adds to a bare interpreter, the least of five."""
    script = "import time; a = time.perf_counter(), time.process_time(); import precedent_engines; " \
        "print(time.perf_counter() - a[0], time.process_time() - a[1])"  # fmt: skip
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(5)
    ]
    found = np.array([[float(value) for value in run.stdout.split()] for run in runs])
    return float(found[:, 0].min()), float(found[:, 1].min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 32, 64])
    parser.add_argument("--drafters", nargs="*", help="only this line-up, in place of all and parts")
    json_option(parser)
    chosen = parser.parse_args()
    measurement, found = Measurement(), list[dict[str, Any]]()
    seconds, work = import_seconds()
    print(f"import: {seconds:.2f} s on the clock, {work:.2f} s of work")
    codec = TokenizerCodec(byte_tokenizer())
    answers = completions(chosen.tokens)
    with tempfile.TemporaryDirectory(prefix="bench-service-") as folder:
        cache = filled(Path(folder), answers, codec.fingerprint)
        line_ups = [tuple(chosen.drafters)] if chosen.drafters else [DRAFTERS, ("recall",), ("prompt",)]
        for drafters in line_ups:
            with DraftingService(cache, codec, drafters, cost=CostCurve.through(COST)) as service:
                warm = service.begin("first", [1, 2, 3], tenant=TENANT, query="order 7 of a customer")
                while not warm.chain(1) and "recall" in drafters:
                    time.sleep(0.05)
                warm.end()
                for number in chosen.rows:
                    found.append(bench(service, answers, number, "+".join(drafters)))
        cache.close()
    imported = {"seconds": seconds, "work_seconds": work}
    measurement.write(chosen.json, {"tokens": chosen.tokens, "import": imported, "rows": found})


if __name__ == "__main__":
    main()
