"""Grammars in the engine: plain constrained decoding's answer with every drafter on, and errors that stay their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.grammar import Grammar, GrammarConstraint, GuidanceEngine, JsonSchema
from precedent.planning.costs import CostCurve
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER, MODEL = byte_tokenizer(), tiny_causal_lm("llama", seed=21)
END = int(TOKENIZER.eos_token_id)
PROMPT = list(b"order 17: ")
PLAIN = SpeculationConfig(enabled=False, write_back=False)
SCHEMA = JsonSchema.of(
    {
        "type": "object",
        "properties": {
            "order": {"type": "string", "maxLength": 6},
            "status": {"enum": ["sent", "sent back", "lost"]},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        },
        "required": ["order", "status", "days"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine with a cache in memory and a draft model, for which width is free."""
    cache = SpeculationCache.open(None, embedder=HashEmbedder())
    draft = tiny_causal_lm("llama", seed=22, num_hidden_layers=1)
    running = Engine(MODEL, TOKENIZER, name="tiny", draft_model=draft, cache=cache, cost=CostCurve())
    yield running
    running.close()
    cache.close()


def constrained(grammar: Grammar) -> tuple[int, ...]:
    """Greedy decoding one token at a time: a whole forward and a new matcher for each."""
    engine, output = GuidanceEngine(TOKENIZER, [END]), []
    while END not in output:
        with torch.inference_mode():
            row = MODEL(input_ids=torch.tensor([[*PROMPT, *output]])).logits[0, -1]
        output.append(int(GrammarConstraint(engine.matcher(grammar), [END])(output, row).argmax()))
    return tuple(output)


def test_greedy_answers_are_those_of_plain_constrained_decoding_with_every_drafter(engine: Engine) -> None:
    """Cold and warm; the answers are written to the cache like any others, and proposed from it."""
    expected = constrained(SCHEMA)
    assert set(json.loads(TOKENIZER.decode(expected[:-1]))) == {"order", "status", "days"}
    plain = engine.submit(PROMPT, SamplingParams(), speculation=PLAIN, grammar=SCHEMA).result()
    assert plain.token_ids == expected
    sources = set()
    for names in (("grammar",), ("recall",), ("prompt", "draft-model"), engine.speculation.drafters):
        for prediction in (None, '{"order": "x17", "status": "lost", "days": [3]}'):
            found = engine.submit(
                PROMPT,
                SamplingParams(),
                speculation=SpeculationConfig(drafters=(*names, "prediction")),
                query="order 17",
                prediction=prediction,
                templates=['{{"order": "{order}", "status": "sent back", "days": ['],
                grammar=SCHEMA,
            ).result()
            assert found.token_ids == expected, names
            assert found.finish_reason == "stop"
            sources |= set(found.stats.accepted_by_source)
    assert {"grammar", "recall", "prediction"} <= sources


def test_forced_tokens_save_steps(engine: Engine) -> None:
    plain = engine.submit(PROMPT, SamplingParams(), speculation=PLAIN, grammar=SCHEMA).result()
    forced = engine.submit(
        PROMPT, SamplingParams(), speculation=SpeculationConfig(drafters=("grammar",)), grammar=SCHEMA
    ).result()
    assert forced.stats.num_accepted_tokens == forced.stats.num_draft_tokens > 20
    assert forced.stats.num_steps < plain.stats.num_steps - 20
