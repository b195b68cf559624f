"""Grammars over small tokenizers, the calls that they allow, and what a grammar refuses of a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import AddedToken

from precedent.grammar import Grammar, GrammarConstraint, GuidanceEngine, JsonSchema, Tool, closed
from precedent.langchain.answer_rules import call_form
from precedent.text.tool_formats import formats as builtin
from precedent_testing.scripted_engine import chatml_tokenizer

PLAIN = chatml_tokenizer()
CONTROLLED = chatml_tokenizer()
CONTROLLED.add_tokens(
    [AddedToken(text) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]")]
)
ENDS = [PLAIN.convert_tokens_to_ids("<|endoftext|>"), PLAIN.eos_token_id]
ENGINES = {id(tokenizer): GuidanceEngine(tokenizer, ENDS) for tokenizer in (PLAIN, CONTROLLED)}


def arguments(name: str, schema: dict, **definitions: dict) -> JsonSchema:
    schema = {"type": "object", "properties": {name: schema}, "required": [name], "$defs": definitions}
    return JsonSchema.of(closed(schema))


TOOLS = (
    Tool("get_weather", arguments("city", {"$ref": "#/$defs/City"}, City={"enum": ["Rome", "Oslo"]})),
    Tool("get_days", arguments("days", {"type": "integer", "minimum": 0, "maximum": 9})),
)
CALL = '<tool_call>\n{"name": "get_days", "arguments": {"days": 3}}\n</tool_call>'
HERMES, LLAMA_JSON, MISTRAL, MISTRAL_ARGS = (
    call_form(form) for form in (builtin.HERMES, builtin.LLAMA_JSON, builtin.MISTRAL, builtin.MISTRAL_ARGS)
)
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
