"""Speculation of vLLM and ours on the same requests: tokens per step and per second, a server after another.

    .venv-vllm/bin/python tests/benchmarks/bench_vllm.py --warm 24 --measured 12 --modes plain ngram suffix precedent
    .venv-vllm/bin/python tests/benchmarks/bench_vllm.py --traces tau_retail.jsonl.gz --pool same-task

Requests are the order desk's, for the model that was adapted to it, or recorded assistant turns for the packaged model
as it is; recorded system turns are cut. Each server first serves the `--warm` requests, which fill what it remembers,
then the measured ones: other runs of the same tasks, or with `--pool other-task` of other tasks. `nothing` is a custom
drafter that proposes nothing (our kill switch); `empty` is ours, warmed under another tenant; `adversarial` is ours
with a store in which every second token of the measured answers is wrong, and needs a mode before it to know these;
`misled` is the same with recall alone, so that the prompt's drafts cannot make up for it.
`precedent` drafts what pays at the measured time of a step, and `free-width` as if a step of 17 tokens cost what one of
a single token does, as on most GPUs; vLLM's drafters do not weigh a step's time either. A step of a request yields its
accepted tokens and one more: tokens per step are tokens / (tokens - accepted).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.vllm_server import NAME, SPECULATION, TOKENS, VllmServer, folder
from helpers.vllm_traffic import desk_runs
from measurement import Measurement, json_option
from transformers import AutoTokenizer

from precedent.cache import NewCompletion, SpeculationCache, tokenizer_fingerprint
from precedent.cli.traces import TracePrompt
from precedent.target.load.packaged import demo_folder
from precedent.text.query import recall_query
from precedent_replay.bench_prompts import recorded_turns
from precedent_server.stored_keys import add_key

NGRAM = {"method": "ngram", "num_speculative_tokens": TOKENS, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
SUFFIX = {"method": "suffix", "num_speculative_tokens": TOKENS}
MODES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": NGRAM,
    "suffix": SUFFIX,
    "nothing": SPECULATION,
    "empty": SPECULATION,
    "adversarial": SPECULATION,
    "misled": SPECULATION,
    "precedent": SPECULATION,
    "free-width": SPECULATION,
}
MISLED = ("adversarial", "misled")
FREE_WIDTH = {"PRECEDENT_VLLM_STEP_COST": '{"1": 20.0, "17": 20.2}'}
GENERATED, ACCEPTED = "vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
LONGEST_PROMPT, ANSWER_TOKENS, WRONG_PER_PROMPT = 1000, 64, 4


@dataclass(frozen=True)
class Desk:
    """Runs of the order desk's agent."""

    num_warm: int
    num_measured: int
    model: Path

    def warm(self, server: VllmServer, key: str) -> None:
        desk_runs(server, key, self.num_warm)

    def measured(self, server: VllmServer, key: str) -> list[Any]:
        return desk_runs(server, key, self.num_measured, first=self.num_warm)

    def mislead(self, store: Path, said: Any) -> None:
        raise SystemExit("adversarial stores are made from recorded turns: give --traces")


@dataclass(frozen=True)
class Recorded:
    """Recorded assistant turns, answered one after the other."""

    before: Sequence[TracePrompt]
    asked: Sequence[TracePrompt]
    model: Path

    def warm(self, server: VllmServer, key: str) -> None:
        self._answers(server, key, self.before)

    def measured(self, server: VllmServer, key: str) -> list[str]:
        return self._answers(server, key, self.asked)

    def mislead(self, store: Path, said: Sequence[str]) -> None:
        """Store wrong answers to the measured prompts, of which every second token is right."""
        tokenizer, choose = AutoTokenizer.from_pretrained(self.model), random.Random(0)
        fingerprint = tokenizer_fingerprint(tokenizer)
        with SpeculationCache.open(store) as cache:
            for turn, text in zip(self.asked, said, strict=True):
                ids, query = tokenizer.encode(text, add_special_tokens=False), recall_query(list(turn.messages))
                for shift in range(WRONG_PER_PROMPT):
                    wrong = [choose.randrange(len(tokenizer)) for _ in ids]
                    wrong[shift % 2 :: 2] = ids[shift % 2 :: 2]
                    cache.insert(NewCompletion(tuple(wrong), fingerprint, NAME, "shop", query))

    def _answers(self, server: VllmServer, key: str, turns: Sequence[TracePrompt]) -> list[str]:
        client, settings = server.client(key), {"temperature": 0.0, "max_tokens": ANSWER_TOKENS}
        asked: list[Any] = [list(turn.messages) for turn in turns]
        answers = [client.chat.completions.create(model=NAME, messages=one, **settings) for one in asked]  # type: ignore[call-overload]
        return [answer.choices[0].message.content or "" for answer in answers]


def measured(mode: str, traffic: Desk | Recorded, folder: Path, said: Any) -> dict[str, Any]:
    """One server's figures, and what the assistant said; `said` is that of the first mode."""
    keys, store = folder / "keys.json", folder / "cache.db"
    key, other = (add_key(keys, name, name) for name in ("shop", "other"))
    settings = {"PRECEDENT_VLLM_STORE": str(store), "PRECEDENT_VLLM_API_KEYS": str(keys)}
    ours = MODES[mode] == SPECULATION
    settings |= {"PRECEDENT_VLLM": "off"} if mode == "nothing" else {}
    settings |= FREE_WIDTH if mode == "free-width" else {}
    settings |= {"PRECEDENT_VLLM_DRAFTERS": "recall"} if mode == "misled" else {}
    if mode in MISLED:
        traffic.mislead(store, said)
    with VllmServer(folder / "log", MODES[mode], traffic.model, **(settings if ours else {})) as server:
        traffic.warm(server, other if mode in ("empty", *MISLED) else key)
        before, begun = server.counts(), time.perf_counter()
        said = traffic.measured(server, key)
        seconds = time.perf_counter() - begun
        found = server.counts()
        found.subtract(before)
    tokens, accepted = found[GENERATED], found[ACCEPTED]
    return {
        "mode": mode,
        "tokens": tokens,
        "tokens_per_step": tokens / (tokens - accepted),
        "tokens_per_second": tokens / seconds,
        "decode_seconds": found["vllm:request_decode_time_seconds_sum"],
        "decode_tokens_per_second": tokens / found["vllm:request_decode_time_seconds_sum"],
        "said": said,
    }


def traffic_of(asked: argparse.Namespace) -> Desk | Recorded:
    if asked.traces is None:
        return Desk(asked.warm, asked.measured, folder())
    model, same = demo_folder(), asked.pool == "same-task"
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns, warm = recorded_turns(asked.traces, tokenizer, asked.measured, asked.warm, LONGEST_PROMPT, same_task=same)
    return Recorded(warm, turns, model)


def beside(one: dict[str, Any], found: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Tokens per step against those of vLLM's own drafters, where these were measured before it."""
    steps = {each["mode"]: each["tokens_per_step"] for each in found[: found.index(one)]}
    return {own: one["tokens_per_step"] / steps[own] if own in steps else None for own in ("ngram", "suffix")}


def main() -> None:
    """Print a line per mode, and whether its texts are those of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[mode for mode in MODES if mode not in MISLED])
    parser.add_argument("--warm", type=int, default=24)
    parser.add_argument("--measured", type=int, default=12)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--pool", choices=("same-task", "other-task"), default="same-task")
    json_option(parser)
    asked = parser.parse_args()
    measurement = Measurement()
    traffic, found, first = traffic_of(asked), list[dict[str, Any]](), None
    for mode in asked.modes:
        with tempfile.TemporaryDirectory() as folder:
            one = measured(mode, traffic, Path(folder), first)
        said = one.pop("said")
        first = said if first is None else first
        found.append(one | {"same_texts": said == first})
        told = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in found[-1].values())
        print(*(f"{name}={value}" for name, value in zip(found[-1], told, strict=True)), flush=True)
    measurement.write(asked.json, {"modes": [one | {"beside": beside(one, found)} for one in found]})


if __name__ == "__main__":
    main()
