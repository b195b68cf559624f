"""llguidance as the grammar engine, an optional part: `pip install 'precedent-llm[grammar]'`."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from precedent.errors import GrammarError, UnsupportedError
from precedent.grammar.lark import to_lark
from precedent.grammar.spec import Grammar, JsonSchema
from precedent.runtime.recent import Recent
from precedent.text.tool_schema import referenced

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

Words = NDArray[np.int32]
"""One bit per token, the lowest bit of the first word for token 0: `[ceil(vocab_size / 32)]`."""

_GRAMMAR_LINE = re.compile(r"\n *\d+ \| ")
_DEAD_END = "NoExtension"

MOST_COMPILED = 64
"""Compiled grammars kept per engine; an agent alternates between a handful."""

MOST_ITEMS, ITEMS_OF_OPTIONAL = 2000, 4
"""Items that llguidance's parser follows at once, and those that an optional property takes; an alternative takes one.

Masks for more take so long that other requests would notice, before llguidance gives up.
"""

MOST_SEARCHED = 16_384
"""Characters of a schema in which the field that cannot be enforced is looked for; each try reads all definitions."""


def is_installed() -> bool:
    """True if llguidance can be imported."""
    return find_spec("llguidance") is not None


def check_installed() -> None:
    """Raise UnsupportedError, with the command to run, unless llguidance is installed."""
    if not is_installed():
        raise UnsupportedError(
            "a grammar needs llguidance, which is not installed: pip install 'precedent-llm[grammar]'"
        )


@lru_cache(maxsize=256)
def unenforceable(schema: JsonSchema) -> str | None:
    """What llguidance cannot enforce in a schema, in its words, or None. Raises UnsupportedError without llguidance.

    The text begins with the field that is the cause, unless it is the whole schema.
    """
    problem = _too_wide(schema.schema) or _problem(schema)
    small = len(schema.text) <= MOST_SEARCHED
    if problem is None or schema.lenient or not small or not isinstance(schema.schema, Mapping):
        return problem
    path, problem = _place(schema.schema, "", problem)
    return f"field {path.removeprefix('.')!r}: {problem}" if path else problem


def _place(schema: Mapping[str, Any], path: str, problem: str) -> tuple[str, str]:
    """The path to the innermost part of a schema that cannot be enforced, and what is wrong with it."""
    defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for step, part in _fields(schema):
        alone = {**part, **defined}
        found = _too_wide(alone) or _problem(JsonSchema.of(alone))
        if found is not None:
            return _place(alone, f"{path}{step}", found)
    return path, problem


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Any]] = []
    if isinstance(schema.get("properties"), Mapping):
        found += [(f".{name}", part) for name, part in schema["properties"].items()]
    found += [("[]", schema.get("items")), ("{}", schema.get("additionalProperties"))]
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        found += [("", one) for one in alternatives] if isinstance(alternatives, list) else []
    yield from ((step, part) for step, part in found if isinstance(part, Mapping))


def _too_wide(root: Any) -> str | None:
    """What is wrong with a schema that needs more than `MOST_ITEMS` at one place."""
    by_reference: dict[str, int] = {}
    widest = 0

    def width(schema: Any) -> int:
        """The items at the start of a schema; also notes the widest place inside."""
        nonlocal widest
        if not isinstance(schema, Mapping):
            return 1
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            for part in _values(schema.get(key)):
                width(part)
        for key in ("items", "additionalProperties", "prefixItems"):
            part = schema.get(key)
            for each in part if isinstance(part, list) else [part]:
                width(each)
        required = {name for name in _values(schema.get("required")) if isinstance(name, str)}
        optional = [name for name in _names(schema.get("properties")) if name not in required]
        alternatives = [part for key in ("anyOf", "oneOf", "allOf") for part in _values(schema.get(key))]
        found = ITEMS_OF_OPTIONAL * len(optional) + sum(map(width, alternatives))
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in by_reference:
                by_reference[reference] = 0  # recursion adds nothing
                by_reference[reference] = width(referenced(reference, root))
            found += by_reference[reference]
        widest = max(widest, found)
        return max(1, found)

    try:
        width(root)
    except RecursionError:
        return "its definitions refer to each other too many times"
    if widest <= MOST_ITEMS:
        return None
    return (
        f"too many optional properties or alternatives at one place: at most {MOST_ITEMS // ITEMS_OF_OPTIONAL} and "
        f"{MOST_ITEMS:,} can be followed; make properties required"
    )


def _values(parts: Any) -> Iterable[Any]:
    return parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, list) else ()


def _names(properties: Any) -> Iterable[str]:
    return properties if isinstance(properties, Mapping) else ()


def _problem(schema: JsonSchema) -> str | None:
    check_installed()
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(_grammar_text(to_lark(schema, {})))
    return _reason(messages[0]) if is_error else None


class GuidanceEngine:
    """Compiles grammars for one tokenizer; converting the tokenizer takes seconds and happens at the first grammar."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._end_ids = tokenizer, sorted(end_token_ids)
        self._converted: LLTokenizer | None = None
        self._control_tokens: dict[str, int] = {}
        self._compiled: Recent[Grammar, LLMatcher] = Recent(MOST_COMPILED)
        self._working = threading.Lock()

    def matcher(self, grammar: Grammar) -> GuidanceMatcher:
        """A matcher at the start of an answer; each grammar is compiled once for all requests.

        Raises UnsupportedError without llguidance, and for a tokenizer or a grammar that it refuses.
        """
        with self._working:
            tokenizer = self._converted or self._convert()
            matcher = self._compiled.get_or_make(
                grammar, lambda: compiled(tokenizer, to_lark(grammar, self._control_tokens))
            )
            return GuidanceMatcher(matcher, tokenizer.vocab_size)

    def _convert(self) -> LLTokenizer:
        check_installed()
        from llguidance.hf import from_tokenizer

        fast: Any = self._tokenizer
        try:
            self._converted = converted = from_tokenizer(fast, eos_token=self._end_ids)
        except (ValueError, RuntimeError) as error:
            raise UnsupportedError(
                f"llguidance cannot read this tokenizer ({_reason(str(error))}): a grammar needs a fast tokenizer"
            ) from error
        added = self._tokenizer.get_added_vocab()
        self._control_tokens = {text: token for text, token in added.items() if converted.is_special_token(token)}
        return converted


def compiled(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher at the start of a grammar. Raises UnsupportedError for one that llguidance refuses."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _grammar_text(lark), log_level=0)
    if matcher.is_error():
        raise UnsupportedError(f"llguidance cannot enforce this grammar: {_reason(matcher.get_error())}")
    return matcher


class GuidanceMatcher:
    """The position of one answer in its grammar. A failed matcher of llguidance is replaced."""

    def __init__(self, start: LLMatcher, vocab_size: int) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self._taken: list[int] = []
        self._num_words = (vocab_size + 31) // 32

    def allowed(self) -> Words:
        """The tokens that may follow, none at a dead end; end tokens only where the grammar accepts.

        Raises GrammarError if the grammar becomes too complex for llguidance.
        """
        words = np.zeros(self._num_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self._recover()
            words[:] = 0
        return words

    def _recover(self) -> None:
        message = self._matcher.get_error()
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(self._taken)
        if not message.startswith(_DEAD_END):
            raise GrammarError(
                f"llguidance gave up on the grammar: {_reason(message)}; simplify the schema, above all its patterns"
            )

    def advance(self, token_ids: Sequence[int]) -> int:
        """Consume tokens as far as the grammar can follow; returns how many it took.

        Raises GrammarError if the grammar becomes too complex for llguidance.
        """
        count = self._matcher.try_consume_tokens(list(token_ids)) if token_ids else 0
        self._taken += token_ids[:count]
        if self._matcher.is_error():
            self._recover()
        return count

    def go_back(self, num_tokens: int) -> None:
        """Undo the last `num_tokens`."""
        self._matcher.rollback(num_tokens)
        del self._taken[len(self._taken) - num_tokens :]

    def forced(self) -> list[int]:
        """The tokens that llguidance knows without the model; its mask allows no other token at each place."""
        return self._matcher.compute_ff_tokens()


def _grammar_text(lark: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(lark)


def _reason(message: str) -> str:
    """The message of llguidance in one line, without the generated grammar and positions in it."""
    line = " ".join(_GRAMMAR_LINE.split(message.partition("<state>")[0])[0].split())
    return line.partition(": failed to compile JSON schema: ")[2] or line
