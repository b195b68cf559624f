"""vLLM's speculation and ours on the same requests: tokens per step and per second, one server after another.

    .venv-vllm/bin/python benchmarks/bench_vllm.py --warm 24 --measured 12 --modes plain ngram suffix precedent
    .venv-vllm/bin/python benchmarks/bench_vllm.py --traces tau_retail.jsonl.gz --pool same-task

Requests are the order desk's, for the model adapted to it, or recorded assistant turns for the packaged model. Each
server first serves the `--warm` requests, then the measured ones: other runs of the same tasks, or with
`--pool other-task` of other tasks. Modes: `nothing` is a custom drafter that proposes nothing; `empty` is ours, warmed
under another tenant; `adversarial` is ours with a store in which every second token of the measured answers is wrong
(it needs a mode before it that finds these answers); `misled` is the same with recall alone; `precedent` drafts what
pays at the measured time of a step; `free-width` drafts as if a step of 17 tokens cost what one token does, as on most
GPUs. Tokens per step are tokens / (tokens - accepted).

`suffix` is compiled, by CMake in a minute, with the environment's programs first in the PATH:

    PATH="$PWD/.venv-vllm/bin:$PATH" pip install --no-deps --no-build-isolation nanobind==2.9.2
    PATH="$PWD/.venv-vllm/bin:$PATH" pip install --no-deps --no-build-isolation arctic-inference==0.1.1
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.vllm_server import NAME, SPECULATION, TOKENS, VllmServer, desk_runs, folder

from measuring import options, run
from precedent.cache import Completion, SpeculationCache, tokenizer_fingerprint
from precedent.target.load.loading import DEMO_TARGET, load_target
from precedent.text.query import recall_query
from precedent_replay.bench_prompts import TracePrompt, recorded_turns
from precedent_server.keys import add_key

MODES: dict[str, tuple[dict[str, Any] | None, dict[str, str]]] = {
    "plain": (None, {}),
    "ngram": (
        {"method": "ngram", "num_speculative_tokens": TOKENS, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        {},
    ),
    "suffix": ({"method": "suffix", "num_speculative_tokens": TOKENS}, {}),
    "nothing": (SPECULATION, {"PRECEDENT_VLLM": "off"}),
    "empty": (SPECULATION, {}),
    "adversarial": (SPECULATION, {}),
    "misled": (SPECULATION, {"PRECEDENT_VLLM_DRAFTERS": "recall"}),
    "precedent": (SPECULATION, {}),
    "free-width": (SPECULATION, {"PRECEDENT_VLLM_STEP_COST": '{"1": 20.0, "17": 20.2}'}),
}
"""vLLM's speculative configuration and our environment variables."""

MISLED = ("adversarial", "misled")
GENERATED, ACCEPTED = "vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
DECODING = "vllm:request_decode_time_seconds_sum"
LONGEST_PROMPT, ANSWER_TOKENS, WRONG_PER_PROMPT = 1000, 64, 4


class Desk:
    """Runs of the order desk's agent."""

    def __init__(self, given: Namespace) -> None:
        self.model, self.num_warm, self.num_measured = folder(), given.warm, given.measured

    def warm(self, server: VllmServer, key: str) -> None:
        desk_runs(server, key, self.num_warm)

    def measured(self, server: VllmServer, key: str) -> list[Any]:
        return desk_runs(server, key, self.num_measured, first=self.num_warm)

    def mislead(self, store: Path, said: Any) -> None:
        raise SystemExit("adversarial stores are made from recorded turns: give --traces")


class Recorded:
    """Recorded assistant turns, answered one after the other."""

    def __init__(self, given: Namespace) -> None:
        self.model, same = Path(tempfile.mkdtemp()), given.pool == "same-task"
        model, self.tokenizer = load_target(DEMO_TARGET, device="cpu", dtype="bfloat16")
        model.save_pretrained(self.model)
        self.tokenizer.save_pretrained(self.model)
        sizes = (given.measured, given.warm, LONGEST_PROMPT)
        self.asked, self.before = recorded_turns(given.traces, self.tokenizer, *sizes, same_task=same)

    def warm(self, server: VllmServer, key: str) -> None:
        self.answers(server, key, self.before)

    def measured(self, server: VllmServer, key: str) -> list[str]:
        return self.answers(server, key, self.asked)

    def mislead(self, store: Path, said: Sequence[str]) -> None:
        """Store wrong answers to the measured prompts; every second token is right."""
        choose, size = random.Random(0), len(self.tokenizer)
        with SpeculationCache.open(store) as cache:
            for turn, text in zip(self.asked, said, strict=True):
                ids, query = self.tokenizer.encode(text, add_special_tokens=False), recall_query(list(turn.messages))
                for shift in range(WRONG_PER_PROMPT):
                    wrong = [choose.randrange(size) for _ in ids]
                    wrong[shift % 2 :: 2] = ids[shift % 2 :: 2]
                    fingerprint = tokenizer_fingerprint(self.tokenizer)
                    cache.insert(Completion(tuple(wrong), fingerprint, NAME, "shop", query))

    def answers(self, server: VllmServer, key: str, turns: Sequence[TracePrompt]) -> list[str]:
        ask: Any = server.client(key).chat.completions.create
        settings = {"model": NAME, "temperature": 0.0, "max_tokens": ANSWER_TOKENS}
        found = [ask(messages=list(turn.messages), **settings) for turn in turns]
        return [answer.choices[0].message.content or "" for answer in found]


def served(mode: str, traffic: Desk | Recorded, folder: Path, said: Any) -> dict[str, Any]:
    """Start a server, warm it and measure; `said` is what the first mode's server answered."""
    keys, store, (speculation, own) = folder / "keys.json", folder / "cache.db", MODES[mode]
    key, other = (add_key(keys, name, name) for name in ("shop", "other"))
    settings = {"PRECEDENT_VLLM_STORE": str(store), "PRECEDENT_VLLM_API_KEYS": str(keys), **own}
    if mode in MISLED:
        traffic.mislead(store, said)
    ours = settings if speculation == SPECULATION else {}
    with VllmServer(folder / "log", speculation, traffic.model, **ours) as server:
        traffic.warm(server, other if mode in ("empty", *MISLED) else key)
        before, begun = server.counts(), time.perf_counter()
        said = traffic.measured(server, key)
        seconds, found = time.perf_counter() - begun, server.counts()
        found.subtract(before)
    tokens, accepted = found[GENERATED], found[ACCEPTED]
    rates = {"tokens_per_second": tokens / seconds, "decode_tokens_per_second": tokens / found[DECODING]}
    return {"mode": mode, "tokens": tokens, "tokens_per_step": tokens / (tokens - accepted), **rates, "said": said}


def measure(given: Namespace) -> dict[str, Any]:
    traffic, found, first, steps = (Recorded if given.traces else Desk)(given), [], None, {}
    for mode in given.modes:
        with tempfile.TemporaryDirectory() as name:
            one = served(mode, traffic, Path(name), first)
        said = one.pop("said")
        first = said if first is None else first
        beside = {own: one["tokens_per_step"] / steps[own] if own in steps else None for own in ("ngram", "suffix")}
        steps[mode] = one["tokens_per_step"]
        found.append(one | {"same_texts": said == first, "beside": beside})
        print(found[-1], flush=True)
    return {"modes": found}


if __name__ == "__main__":
    asked = options(__doc__, warm=24, measured=12, traces=Path)
    everything = [mode for mode in MODES if mode not in MISLED]
    asked.add_argument("--modes", nargs="+", choices=list(MODES), default=everything)
    asked.add_argument("--pool", choices=("same-task", "other-task"), default="same-task")
    run(asked, measure)
