"""Texts with `bitwise=True`: cold, warm, adversarial, continued and batched, against plain decoding; and its cost.

    python benchmarks/bench_bitwise.py [--texts 200] [--tokens 48] [--device cuda] [--without] [--json FILE]

Half of the texts are greedy, half are seeded. Every prompt is first answered plainly, one at a time. `--without`
compares the texts of an engine that makes no promise. The cost is that of prompts and steps, both engines alternating.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench_rounding import SUBJECTS
from measuring import medians, options, run
from precedent.cache import Completion, SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent.text.prompt import render_prompt

FORMS = (
    "Write a text about {}.", "Explain {} to a child.", "List five facts about {}.", "Write a letter about {}.",
    "Tell a short story about {}.", "What should one know about {}?", "Write a poem about {}.",
    "Give three reasons to care about {}.", "Write a conversation about {}.", "What do people get wrong about {}?",
    "Write a headline about {}.", "Describe {} in three sentences.", "Who cares about {}, and why?",
    "Write a diary entry about {}.", "Make a plan that has to do with {}.", "Ask me five questions about {}.",
    "Sum up what is known of {}.",
)  # fmt: skip
PLAIN = SpeculationConfig(enabled=False, write_back=False)
GO_ON = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
AT_ONCE = 8
Texts = list[tuple[int, ...]]


def measure(given: Namespace) -> dict[str, Any]:
    loading = {"dtype": given.dtype, "device": given.device}
    extras = {"draft_model": "first-layers:4", "cache": SpeculationCache.open(None), "bitwise": not given.without}
    engine = Engine.load(given.target, **loading, **extras)
    found = {"texts": given.texts, "tokens": given.tokens, "bitwise": not given.without}
    found["equal_texts"] = compare(engine, given.texts, given.tokens)
    engine.close()
    return found | {"cost_ms": cost(given.target, loading)}


def compare(engine: Engine, number: int, tokens: int) -> dict[str, list[int]]:
    """Count the texts of each way that equal plain decoding's, and all of them."""
    queries = [form.format(subject) for form in FORMS for subject in SUBJECTS][:number]
    first = [render_prompt(engine.tokenizer, [{"role": "user", "content": query}]) for query in queries]

    def answered(asked: Sequence[Sequence[int]], at_once: int = 1, **settings: Any) -> Texts:
        return list(answers(engine, asked, queries, tokens, at_once, settings))

    plain, more = answered(first, speculation=PLAIN), engine.tokenizer.encode(GO_ON)
    second = [[*prompt, *answer, *more] for prompt, answer in zip(first, plain, strict=True)]
    then = answered(second, speculation=PLAIN)
    for query, text in zip(queries, plain, strict=True):
        wrong = tuple(token if place % 2 else (token + 7) % 40_000 for place, token in enumerate(text))
        engine.cache.insert(Completion(wrong, engine.tokenizer_fingerprint, "another", tenant="wrong", query=query))
    ways: dict[str, Callable[[], Texts]] = {
        "cold": lambda: answered(first, tenant="right"),
        "warm": lambda: answered(first, tenant="right"),
        "adversarial": lambda: answered(first, tenant="wrong"),
        f"{AT_ONCE} at once": lambda: answered(first, AT_ONCE, tenant="right"),
        "continued": lambda: answered(second, tenant="right"),
    }
    expected = dict.fromkeys(ways, plain) | {"continued": then}
    return {way: [sum(map(tuple.__eq__, answer(), expected[way])), len(plain)] for way, answer in ways.items()}


def answers(
    engine: Engine, asked: Sequence[Sequence[int]], queries: Sequence[str], tokens: int, at_once: int, settings: Any
) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(asked), at_once):
        running = []
        for number in range(start, min(start + at_once, len(asked))):
            sampled = {} if number % 2 else {"temperature": 0.8, "seed": number}
            params = SamplingParams(max_tokens=tokens, **sampled)
            running.append(engine.submit(asked[number], params, query=queries[number], **settings))
        yield from (one.result().token_ids for one in running)


def cost(name: str, loading: dict[str, Any], rounds: int = 9) -> dict[str, dict[str, float]]:
    """Milliseconds of a prompt of 600 tokens and of a plain step, without the promise and with it."""
    ways: dict[tuple[str, str], Callable[[], object]] = {}
    for way in ("without", "bitwise"):
        target = TargetModel(load_target(name, **loading)[0], bitwise=way == "bitwise")
        ways["prompt of 600", way] = partial(prompt_of_600, target)
        slot = target.new_slot()
        target.prefill(slot, [7 + place % 90 for place in range(601)])
        ways["plain step", way] = partial(plain_step, target, slot)
    times = medians(ways, rounds)  # type: ignore[arg-type]
    found: dict[str, dict[str, float]] = {}
    for (what, way), taken in times.items():  # type: ignore[misc]
        found.setdefault(what, {})[way] = taken
    return {what: each | {"ratio": each["bitwise"] / each["without"]} for what, each in found.items()}


def prompt_of_600(target: TargetModel) -> None:
    target.prefill(target.new_slot(), [7 + place % 90 for place in range(601)])
    wait(target)


def plain_step(target: TargetModel, slot: Any) -> None:
    target.plain_step(slot)
    wait(target)
    target.discard(slot)


def wait(target: TargetModel) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


if __name__ == "__main__":
    asked = options(__doc__, target="smollm2-135m-instruct", dtype=str, device=str, texts=200, tokens=48, without=False)
    run(asked, measure)
