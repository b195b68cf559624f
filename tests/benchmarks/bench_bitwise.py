"""Are greedy and seeded texts byte-equal with speculation off, cold, warm, adversarial, continued and beside others?

    python tests/benchmarks/bench_bitwise.py [--texts 200] [--tokens 48] [--device cuda] [--without] [--json FILE]

Every prompt is answered plainly first, one request at a time; then with an empty cache, with the answers remembered,
with a cache of wrong answers under the very prompts, behind a prefix of which a part was decoded, and eight at once.
`--without` measures the same on an engine that does not promise it. Last, what the promise costs: prompts and steps of
both kinds of engine, alternating.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from bench_rounding import SUBJECTS
from measurement import Measurement, json_option

from precedent.cache import NewCompletion, SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.target import TargetModel, common_prefix
from precedent.target.load.loading import load_target
from precedent.text.prompt import render_prompt

FORMS = (
    "Write a text about {}.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Write a letter about {}.",
    "Tell a short story about {}.",
    "What should one know about {}?",
    "Write a poem about {}.",
    "Give three reasons to care about {}.",
    "Write a conversation about {}.",
    "What do people get wrong about {}?",
    "Write a headline about {}.",
    "Describe {} in three sentences.",
    "Who cares about {}, and why?",
    "Write a diary entry about {}.",
    "Make a plan that has to do with {}.",
    "Ask me five questions about {}.",
    "Sum up what is known of {}.",
)
"""With `SUBJECTS` they make 204 different questions."""

PLAIN = SpeculationConfig(enabled=False, write_back=False)
AT_ONCE = 8
Texts = list[tuple[int, ...]]


class Prompts:
    """Prompts of two turns: what is asked, and what is asked once it was answered."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.queries = [form.format(subject) for form in FORMS for subject in SUBJECTS][:number]
        self._engine = engine
        self.first = [self._rendered(query) for query in self.queries]

    def second(self, answers: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """The conversation goes on: question, answer, another question."""
        more = self._engine.tokenizer.encode("\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")
        return [[*prompt, *answer, *more] for prompt, answer in zip(self.first, answers, strict=True)]

    def _rendered(self, query: str) -> list[int]:
        return list(render_prompt(self._engine.tokenizer, [{"role": "user", "content": query}]))


def sampled(number: int, tokens: int) -> SamplingParams:
    """Greedy and seeded by turns."""
    return SamplingParams(max_tokens=tokens, **({} if number % 2 else {"temperature": 0.8, "seed": number}))


def main() -> None:
    """Compare, time, and write the figures as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", default="smollm2-135m-instruct")
    options.add_argument("--dtype", default=None)
    options.add_argument("--device", default=None)
    options.add_argument("--texts", type=int, default=200, help=f"at most {len(FORMS) * len(SUBJECTS)}")
    options.add_argument("--tokens", type=int, default=48)
    options.add_argument("--without", action="store_true")
    json_option(options)
    chosen = options.parse_args()
    measurement = Measurement()
    engine = Engine.load(
        chosen.target,
        dtype=chosen.dtype,
        device=chosen.device,
        draft_model="first-layers:4",
        cache=SpeculationCache.open(None),
        bitwise=not chosen.without,
    )
    found: dict[str, Any] = {"texts": chosen.texts, "tokens": chosen.tokens, "bitwise": not chosen.without}
    found["equal_texts"] = compare(engine, chosen.texts, chosen.tokens)
    engine.close()
    measurement.write(chosen.json, found | {"cost_ms": cost(chosen.target, chosen.dtype, chosen.device)})


def compare(engine: Engine, number: int, tokens: int) -> dict[str, list[int]]:
    """How many texts of each way are those of plain decoding, of how many; printed."""
    prompts = Prompts(engine, number)

    def answered(asked: Sequence[Sequence[int]], at_once: int = 1, **settings: Any) -> Texts:
        return list(_answered(engine, asked, prompts.queries, tokens, at_once, settings))

    plain = answered(prompts.first, speculation=PLAIN)
    second = prompts.second(plain)
    then = answered(second, speculation=PLAIN)
    assert engine.cache is not None
    for query, text in zip(prompts.queries, plain, strict=True):
        wrong = tuple(token if place % 2 else (token + 7) % 40_000 for place, token in enumerate(text))
        engine.cache.insert(NewCompletion(wrong, engine.tokenizer_fingerprint, "another", tenant="wrong", query=query))
    ways: dict[str, Callable[[], Texts]] = {
        "cold": lambda: answered(prompts.first, tenant="right"),
        "warm": lambda: answered(prompts.first, tenant="right"),
        "adversarial": lambda: answered(prompts.first, tenant="wrong"),
        f"{AT_ONCE} at once": lambda: answered(prompts.first, AT_ONCE, tenant="right"),
    }
    print(f"{len(plain)} texts of at most {tokens} tokens, half of them seeded; bitwise={engine.target.bitwise}")
    equal = {name: _printed(name, run(), plain) for name, run in ways.items()}
    return equal | {"continued": _printed("continued", answered(second, tenant="right"), then)}


def _answered(
    engine: Engine,
    asked: Sequence[Sequence[int]],
    queries: Sequence[str],
    tokens: int,
    at_once: int,
    settings: dict[str, Any],
) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(asked), at_once):
        numbers = range(start, min(start + at_once, len(asked)))
        running = [
            engine.submit(asked[number], sampled(number, tokens), query=queries[number], **settings)
            for number in numbers
        ]
        yield from (one.result().token_ids for one in running)


def _printed(name: str, texts: Texts, plain: Texts) -> list[int]:
    pairs = list(zip(texts, plain, strict=True))
    parted = [common_prefix(text, expected) for text, expected in pairs if text != expected]
    where = f"; half of the others part before token {round(statistics.median(parted)) + 1}" if parted else ""
    print(f"{name:>12}: {len(plain) - len(parted)} of {len(plain)} equal to plain decoding{where}", flush=True)
    return [len(plain) - len(parted), len(plain)]


def cost(name: str, dtype: str | None, device: str | None, rounds: int = 9) -> dict[str, dict[str, float]]:
    """Medians of a prompt of 600 tokens and of steps, both kinds of engine by turns in one process; printed."""
    loaded = {bitwise: load_target(name, dtype=dtype, device=device)[0] for bitwise in (False, True)}
    targets = {bitwise: TargetModel(model, bitwise=bitwise) for bitwise, model in loaded.items()}
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for bitwise, target in targets.items():
            slot = target.new_slot()
            for what, action in (
                ("prompt of 600", lambda: target.prefill(slot, [7 + place % 90 for place in range(601)])),  # noqa: B023  # called at once
                ("plain step", lambda: target.plain_step(slot)),  # noqa: B023  # called at once
            ):
                started = time.perf_counter()
                action()
                if target.device.type == "cuda":
                    torch.cuda.synchronize(target.device)
                seconds.setdefault((what, bitwise), []).append(time.perf_counter() - started)
    found = {}
    for what in ("prompt of 600", "plain step"):
        without, promised = (statistics.median(seconds[what, bitwise]) * 1e3 for bitwise in (False, True))
        print(f"{what:>14}: {without:.1f} ms without, {promised:.1f} ms bitwise: {promised / without:.2f}x")
        found[what] = {"without": without, "bitwise": promised, "ratio": promised / without}
    return found


if __name__ == "__main__":
    main()
