"""Grammars that cannot be are refused by name; objects are closed where nothing else was said."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers.grammars import ENDS, LLAMA_JSON, PLAIN, TOOLS, allowed, constraint, refusal

from precedent.errors import ConfigError, GrammarError, UnsupportedError
from precedent.grammar import (
    ANY_OBJECT,
    Answer,
    CallForm,
    GrammarConstraint,
    GuidanceEngine,
    JsonSchema,
    Regex,
    closed,
    unenforceable,
)

# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs tools, text or content"),
        ({"tools": TOOLS}, "form of their calls together"),
        ({"content": ANY_OBJECT, "text": True}, "set text=False"),
    ],
)
def test_answers_that_cannot_be(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Answer(**settings)


def test_what_would_be_ambiguous_or_no_json_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="look like content"):
        Answer(content=ANY_OBJECT, form=LLAMA_JSON, tools=TOOLS)
    with pytest.raises(ConfigError, match="must start its calls"):
        CallForm(name="odd", trigger="[", begin="{", between=":", end="}")
    with pytest.raises(ConfigError, match="a JSON Schema must be made of JSON values"):
        JsonSchema.of({"const": object()})


def test_what_llguidance_cannot_enforce_is_named() -> None:
    unique = {"type": "array", "uniqueItems": True}
    assert 'Unimplemented keys: ["uniqueItems"]' in (unenforceable(JsonSchema.of(unique)) or "")
    assert unenforceable(JsonSchema.of(unique, lenient=True)) is None
    assert unenforceable(ANY_OBJECT) is None
    with pytest.raises(UnsupportedError, match="uniqueItems"):
        constraint(JsonSchema.of(unique))


def optional(number: int, **more: Any) -> dict[str, Any]:
    """An object with so many properties, all of them optional unless `more` says otherwise."""
    return {"type": "object", "properties": {f"field {n}": {"type": "string"} for n in range(number)}, **more}


@pytest.mark.parametrize(
    "schema",
    [
        optional(501),
        {"type": "array", "items": optional(501)},
        {"anyOf": [optional(300), optional(300)]},
        {"anyOf": [{"$ref": "#/$defs/It"}, {"$ref": "#/$defs/It"}], "$defs": {"It": optional(300)}},
        {"anyOf": [optional(1, required=["field 0"], title=str(n)) for n in range(2001)]},
        {"$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(60)}, "$ref": "#/$defs/0"},
    ],
    ids=["properties", "items", "alternatives", "references", "many alternatives", "doubled again and again"],
)
def test_what_is_too_wide_to_follow_is_named_before_it_is_compiled(schema: dict[str, Any]) -> None:
    """A mask would take so long that other requests would notice, and then the grammar would break off."""
    assert "too many optional properties or alternatives" in (unenforceable(JsonSchema.of(schema)) or "")


def test_definitions_that_lead_too_deep_are_named() -> None:
    deep = {"$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(5000)}, "$ref": "#/$defs/0"}
    assert "its definitions refer to each other too many times" in (unenforceable(JsonSchema.of(deep)) or "")


def test_a_grammar_that_becomes_too_complex_fails_and_does_not_let_everything_through() -> None:
    """The grammar engine gives up at the first brace, which its mask allowed."""
    shape = constraint(JsonSchema.of(closed(optional(600))))
    brace, quote = PLAIN.encode("{x", add_special_tokens=False)
    assert brace in allowed(shape, ())
    for path in ((brace,), (brace, quote)):
        with pytest.raises(GrammarError, match="simplify the schema"):
            allowed(shape, path)


def test_without_llguidance_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if it were not installed
    with pytest.raises(UnsupportedError, match=r"pip install 'precedent-llm\[grammar\]'"):
        GuidanceEngine(PLAIN, ENDS).matcher(ANY_OBJECT)


def test_a_tokenizer_that_llguidance_cannot_read_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="fast tokenizer"):
        GuidanceEngine(object(), ENDS).matcher(ANY_OBJECT)  # type: ignore[arg-type]


def test_a_dead_end_masks_everything() -> None:
    """A vocabulary without the letters that the grammar wants; other paths are none the worse for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    poor = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    shape = GrammarConstraint(GuidanceEngine(poor, [2]).matcher(Regex("b|ac")), [2])
    for path, left in (((0,), []), ((1,), [2]), ((), [0, 1]), ((0,), [])):
        assert shape(path, torch.zeros(3)).isfinite().nonzero().flatten().tolist() == left
    assert shape.forced((0,)) == ()


# Closing


def test_objects_that_name_properties_are_closed_and_others_are_not() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"a": inner, "free": {"type": "object"}, "map": {"additionalProperties": inner}},
        "$defs": {"properties": {"properties": {"x": True}}},
    }
    result = closed(schema)
    assert result["additionalProperties"] is False
    assert result["properties"]["a"]["additionalProperties"] is False
    assert result["properties"]["free"] == {"type": "object"}
    assert result["properties"]["map"]["additionalProperties"]["additionalProperties"] is False
    assert result["$defs"]["properties"]["additionalProperties"] is False
    assert "additionalProperties" not in inner


def test_what_is_long_and_not_wide_is_enforced() -> None:
    named = [f"field {n}" for n in range(1000)]
    assert unenforceable(JsonSchema.of(optional(1000, required=named))) is None
    widest = JsonSchema.of(closed(optional(500)))
    assert unenforceable(widest) is None
    assert refusal(widest, '{"field 7": "x", "field 400": "y"}') is None
    assert (
        unenforceable(JsonSchema.of({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, True]}}, **optional(3)})) is None
    )
