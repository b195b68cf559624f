"""What a grammar costs: conversion of the tokenizer, compilation, a mask, its application to a row, forced tokens.

    python tests/benchmarks/bench_grammar.py [--target smollm2-135m-instruct] [--json FILE]

The larger vocabulary is the tokenizer's own, filled up to 151,936 tokens with pairs of its tokens; medians of new
matchers, for a mask that was computed before is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from llguidance import LLTokenizer, TokenizerWrapper
from measurement import Measurement, json_option

from precedent.grammar import Answer, GrammarConstraint, GuidanceEngine, JsonSchema, Tool, closed
from precedent.grammar.guidance import GuidanceMatcher, compiled
from precedent.grammar.lark import to_lark
from precedent.langchain.structured import call_form
from precedent.target.load.loading import load_target
from precedent.text.tool_formats.builtin import HERMES

LARGE = 151_936
REPEATS = 15
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "days"],
}
GRAMMAR = Answer(form=call_form(HERMES), tools=(Tool("get_weather", JsonSchema.of(closed(SCHEMA))),), text=True)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "San Fra'
PLACES = {
    "free text": "Let me look that up for you",
    "forced": '<tool_call>\n{"name"',
    "in a string": CALL,
    "in a number": f'{CALL}", "days": 1',
}


class Enlarged:
    """A tokenizer's tokens and pairs of them, as llguidance wants to be told of them."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        small = LLTokenizer(tokenizer.backend_tokenizer.to_str())
        texts = [small.decode_bytes([token]) for token in range(small.vocab_size)]
        plain = [text for text in texts[300:] if text.isascii() and len(text) > 2]
        pairs = (left + right for right in plain for left in plain[:400])
        known, self.tokens = set(texts), texts
        while len(self.tokens) < size:
            pair = next(pairs)
            if pair not in known:
                self.tokens.append(pair)
        self.special_token_ids = sorted(tokenizer.get_added_vocab().values())
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, None
        self._encode = lambda text: tokenizer.encode(text.decode(), add_special_tokens=False)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text)


def main() -> None:
    """Print both vocabularies, and write them as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", default="smollm2-135m-instruct")
    json_option(options)
    given = options.parse_args()
    measurement, found = Measurement(), list[dict[str, Any]]()
    _, tokenizer = load_target(given.target)
    started = perf_counter()
    engine = GuidanceEngine(tokenizer, [tokenizer.eos_token_id])
    engine.matcher(GRAMMAR)
    print(f"conversion of the tokenizer and first compilation: {perf_counter() - started:.2f} s")
    paths = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in PLACES.items()}
    for size in (len(tokenizer), LARGE):
        small = size == len(tokenizer)
        source: Any = tokenizer.backend_tokenizer.to_str() if small else TokenizerWrapper(Enlarged(tokenizer, size))
        found.append(measured(LLTokenizer(source, eos_token=tokenizer.eos_token_id), paths, tokenizer.eos_token_id))
    measurement.write(given.json, {"vocabularies": found, "places": [by_place(name, found) for name in PLACES]})


def by_place(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Microseconds at one place, over each vocabulary."""
    return {"name": name, **{what: [one[name][what] for one in found] for what in ("mask", "kept_mask_on_a_row")}}


def measured(tokenizer: LLTokenizer, paths: dict[str, Sequence[int]], end: int) -> dict[str, Any]:
    """The costs over one vocabulary in microseconds, printed."""
    lark, size = to_lark(GRAMMAR, {}), tokenizer.vocab_size
    found: dict[str, Any] = {"vocabulary": size, "compilation_us": timed(lambda: compiled(tokenizer, lark))}
    print(f"\n{size} tokens; compilation {found['compilation_us'] / 1e3:.1f} ms")
    print("microseconds          mask   kept mask on a row   forced tokens")
    start, row = compiled(tokenizer, lark), torch.randn(size)
    for name, path in paths.items():
        shape = GrammarConstraint(GuidanceMatcher(start, size), [end])
        first = median(timed(at_path(start, size, path).allowed, 1) for _ in range(REPEATS))
        applied = timed(lambda shape=shape, path=path: shape(path, row))
        forced = timed(lambda shape=shape, path=path: shape.forced(path))
        print(f"{name:16s} {first:9.0f} {applied:20.0f} {forced:15.0f}")
        found[name] = {"mask": first, "kept_mask_on_a_row": applied, "forced_tokens": forced}
    return found


def at_path(start: Any, size: int, path: Sequence[int]) -> GuidanceMatcher:
    """A new matcher behind a path."""
    matcher = GuidanceMatcher(start, size)
    matcher.advance(path)
    return matcher


def timed(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Microseconds of an action, the median."""
    times = []
    for _ in range(repeats):
        started = perf_counter()
        action()
        times.append((perf_counter() - started) * 1e6)
    return median(times)


if __name__ == "__main__":
    main()
