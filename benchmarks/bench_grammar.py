"""Cost of a grammar: compilation, a new mask, applying a mask that was kept, and finding forced tokens.

    python benchmarks/bench_grammar.py [--target smollm2-135m-instruct] [--json FILE]

The larger vocabulary is the tokenizer's own, extended to 151,936 tokens with pairs of its tokens. A mask is computed
once per matcher state and kept, so new masks are timed on new matchers; medians, microseconds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from llguidance import LLTokenizer, TokenizerWrapper

from measuring import options, run, seconds
from precedent.grammar import Answer, GrammarConstraint, JsonSchema, Tool, closed
from precedent.grammar.guidance import GuidanceMatcher, compiled
from precedent.grammar.lark import to_lark
from precedent.langchain.structured import call_form
from precedent.target.load.loading import load_target
from precedent.text.tool_formats.formats import HERMES

LARGE, REPEATS = 151_936, 15
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
    """A tokenizer's tokens and pairs of them, in the form that llguidance reads."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        small = LLTokenizer(tokenizer.backend_tokenizer.to_str())
        self.tokens = [small.decode_bytes([token]) for token in range(small.vocab_size)]
        plain, known = [text for text in self.tokens[300:] if text.isascii() and len(text) > 2], set(self.tokens)
        pairs = (left + right for right in plain for left in plain[:400] if left + right not in known)
        while len(self.tokens) < size:
            self.tokens.append(next(pairs))
        self.special_token_ids = sorted(tokenizer.get_added_vocab().values())
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)  # type: ignore[no-any-return]


def measure(given: Namespace) -> dict[str, Any]:
    _, tokenizer = load_target(given.target)
    paths = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in PLACES.items()}
    sources: list[Any] = [tokenizer.backend_tokenizer.to_str(), TokenizerWrapper(Enlarged(tokenizer, LARGE))]
    end = tokenizer.eos_token_id
    found = [costs(LLTokenizer(source, eos_token=end), paths, end) for source in sources]
    kinds = ("mask", "kept_mask_on_a_row")
    places = [{"name": name} | {kind: [one[name][kind] for one in found] for kind in kinds} for name in PLACES]
    return {"vocabularies": found, "places": places}


def costs(tokenizer: LLTokenizer, paths: dict[str, list[int]], end: int) -> dict[str, Any]:
    lark, size = to_lark(GRAMMAR, {}), tokenizer.vocab_size
    found: dict[str, Any] = {"vocabulary": size, "compilation": microseconds(lambda: compiled(tokenizer, lark))}
    start, row = compiled(tokenizer, lark), torch.randn(size)

    def new_mask(path: list[int]) -> float:
        matcher = GuidanceMatcher(start, size)
        matcher.advance(path)
        return seconds(matcher.allowed) * 1e6

    for name, path in paths.items():
        shape = GrammarConstraint(GuidanceMatcher(start, size), [end])
        found[name] = {
            "mask": median(new_mask(path) for _ in range(REPEATS)),
            "kept_mask_on_a_row": microseconds(lambda: shape(path, row)),  # noqa: B023  # called at once
            "forced_tokens": microseconds(lambda: shape.forced(path)),  # noqa: B023
        }
    return found


def microseconds(action: Callable[[], object]) -> float:
    return median(seconds(action) for _ in range(REPEATS)) * 1e6


if __name__ == "__main__":
    run(options(__doc__, target="smollm2-135m-instruct"), measure)
