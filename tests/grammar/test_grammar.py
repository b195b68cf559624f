"""Grammars as constraints: masks by path, forced tokens, calls in their formats, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from precedent.config import SamplingParams
from precedent.errors import ConfigError, UnsupportedError
from precedent.grammar import (
    ANY_OBJECT,
    Answer,
    CallForm,
    Grammar,
    GrammarConstraint,
    GuidanceEngine,
    JsonSchema,
    Lark,
    Reasoning,
    Regex,
    Tool,
    closed,
    unenforceable,
)
from precedent.grammar import constraint as constraint_module
from precedent.grammar.constraint import unpacked
from precedent.langchain.structured import call_form
from precedent.sampling.constraints import constraints_for
from precedent.sampling.row_shaper import shaped_rows
from precedent.testing.scripted_engine import chatml_tokenizer
from precedent.text.tool_formats import builtin

PLAIN = chatml_tokenizer()
CONTROLLED = chatml_tokenizer()
CONTROLLED.add_tokens(
    [AddedToken(text) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]")]
)
ENDS = [PLAIN.convert_tokens_to_ids("<|endoftext|>"), PLAIN.eos_token_id]
ENGINES = {id(tokenizer): GuidanceEngine(tokenizer, ENDS) for tokenizer in (PLAIN, CONTROLLED)}
BOTH = pytest.mark.parametrize("tokenizer", [PLAIN, CONTROLLED], ids=["as text", "as control tokens"])


def arguments(name: str, schema: dict, **definitions: dict) -> JsonSchema:
    schema = {"type": "object", "properties": {name: schema}, "required": [name], "$defs": definitions}
    return JsonSchema.of(closed(schema))


TOOLS = (
    Tool("get_weather", arguments("city", {"$ref": "#/$defs/City"}, City={"enum": ["Rome", "Oslo"]})),
    Tool("get_days", arguments("days", {"type": "integer", "minimum": 0, "maximum": 9})),
)
CALL = '<tool_call>\n{"name": "get_days", "arguments": {"days": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES, LLAMA_JSON, MISTRAL, MISTRAL_ARGS = (
    call_form(form) for form in (builtin.HERMES, builtin.LLAMA_JSON, builtin.MISTRAL, builtin.MISTRAL_ARGS)
)
BARE = '{"name": "get_days", "arguments": {"days": 3}}'
END = "END"


def constraint(grammar: Grammar, tokenizer=PLAIN) -> GrammarConstraint:
    return GrammarConstraint(ENGINES[id(tokenizer)].matcher(grammar), ENDS)


def allowed(shape: GrammarConstraint, output_ids: Sequence[int], tokenizer=PLAIN) -> set[int]:
    """Ids that the mask leaves; all of them outside of the grammar."""
    row = shape(output_ids, torch.zeros(len(tokenizer)))
    return set(row.isfinite().nonzero().flatten().tolist())


def refusal(grammar: Grammar, text: str, tokenizer=PLAIN) -> str | None:
    """The text before the first masked token, None if every token is allowed and the answer may end there."""
    shape = constraint(grammar, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for count, token in enumerate(ids):
        if token not in allowed(shape, ids[:count], tokenizer):
            return tokenizer.decode(ids[:count])
    return None if set(ENDS) <= allowed(shape, ids, tokenizer) else END


# Masks


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
    assert refusal(ANY_OBJECT, '{"a": [1, 2], "b": {}}') is None


def test_every_end_token_ends_an_answer_and_none_does_before() -> None:
    shape = constraint(Regex("ab"))
    a, b = PLAIN.encode("ab", add_special_tokens=False)
    assert allowed(shape, ()) == {a}
    assert allowed(shape, (a,)) == {b}
    assert allowed(shape, (a, b)) == set(ENDS)


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


def test_all_rows_are_masked_as_each_of_them_is() -> None:
    """Paths in any order, twice, outside of the grammar and behind its end; rows wider than the tokenizer."""
    rng, rows = random.Random(5), torch.randn(7, len(PLAIN) + 5, dtype=torch.bfloat16)
    a, b = PLAIN.encode("ab", add_special_tokens=False)
    paths = [(), (a,), (a, b), (a, b, ENDS[0]), (b,), (b, a), (a,)]
    before = rows.clone()
    for _ in range(5):
        rng.shuffle(paths)
        alone = [constraint(Regex("ab"))(path, row) for path, row in zip(paths, rows, strict=True)]
        assert torch.equal(constraint(Regex("ab")).shape_all(paths, rows, math.inf), torch.stack(alone))
    assert torch.equal(rows, before)
    assert sum(bool(row.isinf().any()) for row in alone) == 4


def test_masks_that_take_long_are_not_found_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those that were found before it was noticed are kept."""
    shape, rows, found = constraint(Regex("ab")), torch.randn(3, len(PLAIN)), []
    allowed = shape._matcher.allowed
    monkeypatch.setattr(shape._matcher, "allowed", lambda: found.append(1) or allowed())
    (a,) = PLAIN.encode("a", add_special_tokens=False)
    times = itertools.count()
    monkeypatch.setattr(constraint_module, "perf_counter", lambda: next(times))
    assert shape.shape_all([(a, a), (a,), ()], rows, 0) is None
    assert len(found) == 1, "() comes first, and is looked at at time 0"
    assert shape.shape_all([(a, a), (a,), ()], rows, 0) is None
    assert torch.equal(shape((), rows[0]), constraint(Regex("ab"))((), rows[0]))
    assert len(found) == 1
    assert torch.equal(shape.shape_all([(), (a,)], rows[:2], math.inf)[1], constraint(Regex("ab"))((a,), rows[1]))
    assert len(found) == 2


def test_bits_are_spread_out_on_any_device() -> None:
    """The operations that a GPU runs, here on a CPU."""
    bits = np.random.default_rng(0).integers(0, 256, (5, 33), dtype=np.uint8)
    spread = unpacked(torch.from_numpy(bits))
    assert spread.dtype == torch.bool
    assert spread.tolist() == np.unpackbits(bits, axis=1, bitorder="little").astype(bool).tolist()


@pytest.mark.gpu
def test_on_cuda_all_rows_are_constrained_without_waiting() -> None:
    """By a grammar and a penalty, to the very numbers of a CPU."""
    rows = torch.randn(3, len(PLAIN) + 5, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    (a,) = PLAIN.encode("a", add_special_tokens=False)
    for prompt, paths in (([], [(), (a,), (a, a)]), ([a], [(a,)] * 3)):
        shape = constraints_for(SamplingParams(repetition_penalty=1.3), prompt, constraint(Regex("ab")))
        on_cuda = rows.cuda()
        try:
            torch.cuda.set_sync_debug_mode("error")
            found = shaped_rows(shape, paths, on_cuda, math.inf)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found.cpu(), shaped_rows(shape, paths, rows, math.inf))


def test_what_is_forced_is_alone_in_its_mask_and_ends_at_a_choice() -> None:
    shape = constraint(Answer(form=HERMES, tools=TOOLS))
    forced = shape.forced(())
    assert PLAIN.decode(list(forced)) == '<tool_call>\n{"name": "get_'
    for count, token in enumerate(forced):
        assert allowed(shape, forced[:count]) == {token}
    assert len(allowed(shape, forced)) == 2
    called = PLAIN.encode('<tool_call>\n{"name": "get_d', add_special_tokens=False)
    assert PLAIN.decode(list(shape.forced(called))) == 'ays", "arguments": {"days": '


def test_a_single_end_token_is_forced_too() -> None:
    shape = GrammarConstraint(GuidanceEngine(PLAIN, [ENDS[1]]).matcher(Regex("ab")), [ENDS[1]])
    assert PLAIN.decode(list(shape.forced(()))) == "ab<|im_end|>"
    assert shape.forced(shape.forced(())) == ()


# Calls


@BOTH
def test_forced_calls(tokenizer) -> None:
    several, one = Answer(form=HERMES, tools=TOOLS), Answer(form=HERMES, tools=TOOLS, parallel=False)
    assert refusal(several, CALL, tokenizer) is None
    assert refusal(several, f"{CALL}\n{OTHER}", tokenizer) is None
    assert refusal(one, CALL, tokenizer) is None
    assert allowed(constraint(one, tokenizer), tokenizer.encode(CALL), tokenizer) == set(ENDS)
    assert refusal(several, "", tokenizer) == END
    assert refusal(several, "Sure.", tokenizer) == ""
    assert refusal(several, CALL.replace("3", "10"), tokenizer) == CALL.partition("3")[0] + "1"
    assert refusal(several, OTHER.replace("Oslo", "Bonn"), tokenizer) == OTHER.partition("Oslo")[0]


@BOTH
def test_calls_that_the_model_may_make_in_its_text(tokenizer) -> None:
    free, one = (Answer(form=HERMES, tools=TOOLS, text=True, parallel=parallel) for parallel in (True, False))
    for text in ("", "Hi there.", "1 < 2, <tool", CALL, f"Hi. {CALL}\n{OTHER}", f"{CALL} and then {OTHER} done."):
        assert refusal(free, text, tokenizer) is None
    assert refusal(free, "Hi. <tool_call>x", tokenizer) == "Hi. <tool_call>"
    assert refusal(free, CALL.replace("3", '"3"'), tokenizer) == CALL.partition("3")[0]
    assert refusal(one, f"Hi. {CALL}", tokenizer) is None
    assert allowed(constraint(one, tokenizer), tokenizer.encode(f"Hi. {CALL}"), tokenizer) == set(ENDS)


@BOTH
def test_calls_or_json(tokenizer) -> None:
    either = Answer(form=HERMES, tools=TOOLS, content=arguments("days", {"type": "integer"}))
    assert refusal(either, CALL, tokenizer) is None
    assert refusal(either, '{"days": 3}', tokenizer) is None
    assert refusal(either, "Three days.", tokenizer) == ""
    assert refusal(either, f'{{"days": 3}}{CALL}', tokenizer) == '{"days": 3}'


@BOTH
def test_reasoning_comes_first_and_may_say_anything(tokenizer) -> None:
    thought = "<think>\nWhich tool? a {call}\n</think>\n\n"
    forced = Answer(form=HERMES, tools=TOOLS, reasoning=Reasoning())
    assert refusal(forced, thought + CALL, tokenizer) is None
    assert refusal(forced, CALL, tokenizer) is None
    assert refusal(forced, thought + "Hi", tokenizer) == thought
    begun = Answer(form=HERMES, tools=TOOLS, text=True, reasoning=Reasoning(begun=True))
    assert refusal(begun, "Hm.</think>Hi.", tokenizer) is None
    assert refusal(begun, "Hm.", tokenizer) == END
    assert refusal(begun, f"Hm.</think>\n\n{CALL}", tokenizer) is None
    content = Answer(content=JsonSchema.of({"const": "x"}), reasoning=Reasoning())
    assert refusal(content, f'{thought}"x"', tokenizer) is None
    assert refusal(content, thought, tokenizer) == END


def test_a_call_is_forced_inside_text_but_not_inside_reasoning() -> None:
    """One automaton: what a marker means depends on the node's own path."""
    begun = Answer(form=HERMES, tools=TOOLS, text=True, reasoning=Reasoning(begun=True))
    assert refusal(begun, "Say <tool_call>x here.</think>Hi.") is None
    assert refusal(begun, "Say</think> <tool_call>x") == "Say</think> <tool_call>"


@BOTH
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MISTRAL, f"[TOOL_CALLS][{BARE}, {BARE}]"),
        (MISTRAL_ARGS, '[TOOL_CALLS]get_days[ARGS]{"days": 3}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'),
        (LLAMA_JSON, '{"name": "get_days", "parameters": {"days": 3}}'),
    ],
    ids=lambda value: value.name if isinstance(value, CallForm) else "",
)
def test_other_forms_of_calls(tokenizer, form: CallForm, text: str) -> None:
    forced, free = Answer(form=form, tools=TOOLS), Answer(form=form, tools=TOOLS, text=True)
    assert refusal(forced, text, tokenizer) is None
    assert refusal(free, text, tokenizer) is None
    assert refusal(free, "No call.", tokenizer) is None
    assert refusal(free, text.replace("get_", "set_"), tokenizer) == text.partition("get_")[0]
    if not form.whole_answers:
        assert refusal(free, f"Hi. {text}", tokenizer) is None


def test_names_that_json_or_a_grammar_would_misread() -> None:
    tool = Tool('say "hi"/\\{é}', ANY_OBJECT)
    name = json.dumps(tool.name, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": {name}, "arguments": {{}}}}\n</tool_call>'
    assert refusal(Answer(form=HERMES, tools=(tool,)), text) is None


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


def test_calls_without_a_mark_cannot_stand_for_content() -> None:
    with pytest.raises(UnsupportedError, match="look like content"):
        Answer(content=ANY_OBJECT, form=LLAMA_JSON, tools=TOOLS)


def test_a_form_begins_with_its_trigger() -> None:
    with pytest.raises(ConfigError, match="must start its calls"):
        CallForm(name="odd", trigger="[", begin="{", between=":", end="}")


def test_what_llguidance_cannot_enforce_is_named() -> None:
    unique = {"type": "array", "uniqueItems": True}
    assert 'Unimplemented keys: ["uniqueItems"]' in (unenforceable(JsonSchema.of(unique)) or "")
    assert unenforceable(JsonSchema.of(unique, lenient=True)) is None
    assert unenforceable(ANY_OBJECT) is None
    with pytest.raises(UnsupportedError, match="uniqueItems"):
        constraint(JsonSchema.of(unique))


def test_a_schema_must_be_json() -> None:
    with pytest.raises(ConfigError, match="JSON values"):
        JsonSchema.of({"const": {1, 2}})


def test_without_llguidance_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precedent.grammar.guidance.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'precedent-llm\[grammar\]'"):
        GuidanceEngine(PLAIN, ENDS).matcher(ANY_OBJECT)
    assert importlib.util.find_spec("llguidance") is not None


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


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": True}}, {"properties": {"b": True}}]},
        {"properties": {"x": {"properties": {"a": True}, "anyOf": [{"properties": {"b": True}}]}}},
        {"properties": {"a": True}, "additionalProperties": True},
        {"items": {"properties": {"a": True}, "patternProperties": {"^b": True}}},
    ],
)
def test_schemas_that_leave_room_on_purpose_stay_as_they_are(schema: dict) -> None:
    assert closed(schema) == schema
