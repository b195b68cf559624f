"""Whatever a random model wants to say, an answer under a JSON Schema parses and validates, speculated or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import torch
from helpers.stepping import run, start
from helpers.tabled_model import TabledModel
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.base import Drafter
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.grammar import GrammarConstraint, GuidanceEngine, JsonSchema, closed
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.sampling.rng import entropy_rng
from precedent_testing.drafters import OracleDrafter
from precedent_testing.scripted_engine import chatml_tokenizer

TOKENIZER = chatml_tokenizer()
END = int(TOKENIZER.eos_token_id)
ENGINE = GuidanceEngine(TOKENIZER, [END])
PROMPT = (40, 41)
MOST_TOKENS = 3000


def integers(low: int, width: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": low + width}


leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "string", "format": "date"}]),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 4)),
    st.builds(
        lambda letters, most: {"type": "string", "pattern": f"^[{letters}]{{1,{most}}}$"},
        st.sampled_from(["ab", "0-9é", "a-z "]),
        st.integers(1, 3),
    ),
    st.builds(integers, st.integers(-30, 30), st.integers(0, 50)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text(max_size=4), st.integers(), st.none()), min_size=1, max_size=3),
    ),
)


def objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", 'odd "name"', "ü", "x/y\\n"])
    properties = st.dictionaries(names, schemas, max_size=3)
    return properties.flatmap(
        lambda found: st.builds(
            lambda required: closed({"type": "object", "properties": found, "required": required}),
            st.lists(st.sampled_from(sorted(found)), unique=True) if found else st.just([]),
        )
    )


def arrays(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        schemas,
        st.integers(0, 1),
        st.integers(0, 2),
    )


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


def random_model(seed: int) -> TabledModel:
    """Logits that depend on the whole context and on nothing that makes sense."""

    def logits_of(token_ids: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, token_ids)) & 0x7FFFFFFF)
        return torch.randn(len(TOKENIZER), generator=generator, dtype=torch.float64)

    return TabledModel(logits_of)


def answer(
    schema: JsonSchema, seed: int, sampling: SamplingParams, mode: str, drafters: Sequence[Drafter] = ()
) -> DecodingSequence:
    """An answer of a random model through the loop, under a schema."""
    target, shape = random_model(seed), GrammarConstraint(ENGINE.matcher(schema), [END])
    given = {"prompt": PROMPT, "mode": mode, "shape": shape, "ends": frozenset({END}), "rng_of": entropy_rng(seed)}
    sequence = start(target, drafters, sampling, **given)
    run(target, sequence, DecodeLoop(target, Planner(CostCurve())))
    return sequence


@settings(max_examples=30)
@given(schema=schemas, seed=st.integers(0, 2**30), sampled=st.booleans())
def test_every_answer_is_json_of_its_schema_and_the_same_with_speculation(
    schema: Any, seed: int, sampled: bool
) -> None:
    wanted = JsonSchema.of(schema)
    mode = "coupled" if sampled else "greedy"
    sampling = SamplingParams(
        temperature=1.0 if sampled else 0.0, seed=seed if sampled else None, max_tokens=MOST_TOKENS
    )
    plain = answer(wanted, seed, sampling, mode)
    assert plain.finish_reason == "stop"
    text = TOKENIZER.decode(plain.output_ids[:-1])
    jsonschema.validate(json.loads(text), schema)
    misled = [*plain.output_ids[:7], 70, *plain.output_ids[8:]]
    drafters = [OracleDrafter(misled), GrammarDrafter(), DraftModelDrafter(random_model(seed + 1))]  # type: ignore[arg-type]
    assert answer(wanted, seed, sampling, mode, drafters).output_ids == plain.output_ids


@settings(max_examples=15)
@given(schema=schemas, seed=st.integers(0, 2**30))
def test_what_the_grammar_forces_is_always_accepted(schema: Any, seed: int) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=MOST_TOKENS)
    sequence = answer(JsonSchema.of(schema), seed, sampling, "traversal", [GrammarDrafter()])
    assert sequence.stats.drafted_by_source["grammar"] == sequence.stats.accepted_by_source["grammar"]
