"""What every engine with a draft head promises: answers of plain decoding, grammars that hold, turns that continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from helpers.hybrids import random_ids
from helpers.small_engines import PLAIN, PROMPT
from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.grammar import JsonSchema
from precedent.planning.gate import Gate
from precedent_testing.embedders import HashEmbedder

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=20),
    "seeded": SamplingParams(temperature=0.9, seed=7, max_tokens=20),
}
SCHEMA = JsonSchema.of({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


class AlwaysOpen(Gate):
    """Lets every step draw, whatever it costs."""

    def decide(self, wanted: int, open_mass: float = 1.0) -> int:
        """Four draws."""
        return 4


def check_answers(engine: Engine, drafter: str, names: Sequence[str], sampling: SamplingParams) -> None:
    """Answers are plain decoding's, for concurrent requests of ragged lengths, twice; and the drafter has drafted."""
    prompts = [PROMPT, PROMPT[:9], PROMPT[:1], random_ids(1, 70)]
    expected = [engine.submit(prompt, sampling, speculation=PLAIN).result().token_ids for prompt in prompts]
    speculation = SpeculationConfig(drafters=tuple(names))
    for _ in range(2):
        asked = [engine.submit(prompt, sampling, speculation=speculation, query="order") for prompt in prompts]
        assert [each.result().token_ids for each in asked] == expected
    alone = engine.submit(PROMPT, sampling, speculation=SpeculationConfig(drafters=(drafter,))).result()
    assert alone.token_ids == expected[0]
    assert alone.stats.drafted_by_source[drafter] > 0


def check_grammar(engine: Engine, drafter: str, temperature: float = 0.0) -> None:
    """What the grammar forbids is not answered."""
    sampling = SamplingParams(max_tokens=30, temperature=temperature)
    plain, drafted = (
        engine.submit(PROMPT, sampling, grammar=SCHEMA, speculation=each).result()
        for each in (PLAIN, SpeculationConfig(drafters=("grammar", drafter)))
    )
    assert len(drafted.token_ids) > 5
    if not temperature:
        assert drafted.token_ids == plain.token_ids


def check_next_turns(engine_with: Callable[..., Engine], folder: Path, speculation: SpeculationConfig) -> None:
    """What the head reads comes back with the KV cache, from idle conversations and from disk."""
    prompt, sampling = [*random_ids(5, 100), *PROMPT], SamplingParams(max_tokens=12)
    answers: list[Any] = []
    for _ in range(2):
        with SpeculationCache.open(folder / "c.db", embedder=HashEmbedder()) as cache:
            engine = engine_with(cache=cache, keep_prefixes=True)
            first = engine.submit(prompt, sampling, prefix_tokens=100).result()
            turn = [*prompt, *first.token_ids, *b" and then?"]
            second = engine.submit(turn, sampling, speculation=speculation).result()
            plain = engine.submit(turn, sampling, speculation=PLAIN).result()
            engine.close()
        assert second.cached_prompt_tokens >= len(prompt)
        assert second.token_ids == plain.token_ids
        assert second.stats.drafted_by_source[speculation.drafters[0]] > 0
        answers.append((first.token_ids, second.token_ids, first.cached_prompt_tokens))
    (*kept, cached), (*again, cached_again) = answers
    assert kept == again
    assert (cached, cached_again) == (0, 100)
