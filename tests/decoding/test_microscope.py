"""Steps kept for somebody who looks at them."""

from __future__ import annotations

from contextlib import closing

import pytest

from precedent.config import SamplingParams
from precedent_testing.scripted_model import scripted_model_engine

ANSWER = "one two three four five six seven eight nine ten"


@pytest.mark.parametrize("max_tokens", [6, 200])
def test_steps_and_the_tokens_before_them_make_up_the_answer(max_tokens: int) -> None:
    """Also of an answer that its limit cuts short."""
    with closing(scripted_model_engine(lambda prompt: ANSWER)) as engine:
        watched = engine.watch_steps(100)
        prompt = engine.tokenizer.encode("count: ")
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        result = engine.submit(prompt, sampling, prediction=ANSWER).result()
        steps = watched.steps()[::-1]
        known = [*prompt, *result.token_ids]
        at = len(prompt)
        for step in steps:
            chosen = [*(step.tree.token_ids[node] for node in step.path), step.next_token]
            found = [*step.before, *chosen]
            starts = range(at - len(step.before), len(known) - len(step.before))
            start = next(place for place in starts if known[place : place + len(found)] == found[: len(known) - place])
            at = start + len(step.before) + 1
        assert sum(len(step.path) for step in steps) > 3
        assert all(len(step.estimates) == len(step.tree) for step in steps)


def test_watching_changes_nothing() -> None:
    texts = []
    for watch in (False, True):
        with closing(scripted_model_engine(lambda prompt: ANSWER)) as engine:
            watched = engine.watch_steps(4) if watch else None
            result = engine.submit(
                engine.tokenizer.encode("count: "), SamplingParams(temperature=0, max_tokens=60)
            ).result()
            texts.append(result.text)
    assert texts[0] == texts[1]
    assert watched is not None
    assert 0 < len(watched.steps()) <= 4
