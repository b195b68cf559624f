"""Grammars as constraints: masks that depend on the path alone, and forced tokens."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.grammars import CALL, END, ENDS, HERMES, PLAIN, TOOLS, allowed, arguments, constraint, refusal

from precedent.errors import UnsupportedError
from precedent.grammar import Answer, GuidanceEngine, JsonSchema, Lark, Regex, guidance


def test_a_schema_allows_its_json_and_nothing_else() -> None:
    schema = arguments("days", {"type": "integer"})
    assert refusal(schema, '{"days": -12}') is None
    assert refusal(schema, '{"days": 1') == END
    assert refusal(schema, '{"days": "1"}') == '{"days": '
    assert refusal(schema, '{"hours": 1}') == '{"'
    assert refusal(schema, '{"days":1}') == '{"days":'


def test_other_notations() -> None:
    assert refusal(Regex("a{2,3}/\n?"), "aaa/\n") is None
    assert refusal(Regex("a{2,3}"), "a") == END
    assert refusal(Lark('start: "x" start | "y"'), "xxy") is None
    assert refusal(JsonSchema.of(True), '[1, {"a": null}]') is None
    with pytest.raises(UnsupportedError, match="cannot enforce this grammar"):  # false: no value is allowed
        constraint(JsonSchema.of(False))


def test_grammars_are_compiled_once_while_they_are_among_the_last_used(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    compiled = guidance.compiled
    monkeypatch.setattr(guidance, "compiled", lambda tokenizer, text: texts.append(text) or compiled(tokenizer, text))
    monkeypatch.setattr(guidance, "MOST_COMPILED", 2)
    engine = GuidanceEngine(PLAIN, ENDS)
    for pattern in "abacb":
        engine.matcher(Regex(pattern))
    assert [text[-2] for text in texts] == ["a", "b", "c", "b"], "the second a was there, and b had made way for c"


def test_a_path_outside_of_the_grammar_or_behind_its_end_is_left_alone() -> None:
    shape, row = constraint(Regex("ab")), torch.randn(len(PLAIN))
    a, b = PLAIN.encode("ab", add_special_tokens=False)
    for path in ((b,), (b, a, a), (a, b, ENDS[0]), (a, b, ENDS[1])):
        assert torch.equal(shape(path, row), row)
    assert allowed(shape, (a,)) == {b}


def test_logits_that_stay_are_the_models_own_and_the_row_given_is_untouched() -> None:
    shape, row = constraint(Regex("[ab]")), torch.randn(len(PLAIN) + 5, dtype=torch.float64)
    before, masked = row.clone(), shape((), row)
    kept = masked.isfinite()
    assert torch.equal(row, before)
    assert torch.equal(masked[kept], row[kept])
    assert int(kept.sum()) == 2
    assert not kept[len(PLAIN) :].any()


def test_masks_depend_on_the_path_alone_whatever_was_asked_before() -> None:
    """One matcher that walks a tree to and fro, against a new one for every node."""
    grammar = Answer(form=HERMES, tools=TOOLS, text=True)
    walker, rng, paths = constraint(grammar), random.Random(3), [()]
    for _ in range(60):
        path = rng.choice(paths)
        choices = allowed(walker, path)
        assert choices == allowed(constraint(grammar), path)
        script = PLAIN.encode(f"Hm. {CALL}", add_special_tokens=False)
        on_script = path == tuple(script[: len(path)]) and len(path) < len(script)
        token = script[len(path)] if on_script and rng.random() < 0.9 else rng.choice(sorted(choices))
        if token not in ENDS:
            paths.append((*path, token))


def test_what_is_forced_is_alone_in_its_mask_and_ends_at_a_choice() -> None:
    shape = constraint(Answer(form=HERMES, tools=TOOLS))
    forced = shape.forced(())
    assert PLAIN.decode(list(forced)) == '<tool_call>\n{"name": "get_'
    for count, token in enumerate(forced):
        assert allowed(shape, forced[:count]) == {token}
    assert len(allowed(shape, forced)) == 2
    called = PLAIN.encode('<tool_call>\n{"name": "get_d', add_special_tokens=False)
    assert PLAIN.decode(list(shape.forced(called))) == 'ays", "arguments": {"days": '


def test_every_end_token_ends_an_answer_and_none_does_before() -> None:
    shape = constraint(Regex("ab"))
    a, b = PLAIN.encode("ab", add_special_tokens=False)
    assert allowed(shape, ()) == {a}
    assert allowed(shape, (a,)) == {b}
    assert allowed(shape, (a, b)) == set(ENDS)
