"""What the microscope keeps of a decode loop's steps."""

from __future__ import annotations

from contextlib import closing

import pytest

from precedent.config import SamplingParams
from precedent_server.microscope import Microscope
from precedent_testing.scripted_model import scripted_model_engine


@pytest.mark.parametrize("max_tokens", [6, 200])
def test_watched_steps_and_the_tokens_before_them_make_up_the_answer(max_tokens: int) -> None:
    """Also of an answer that its limit cuts short; watching changes nothing."""
    said, texts = "one two three four five six seven eight nine ten", []
    for watch in (False, True):
        with closing(scripted_model_engine(lambda prompt: said)) as engine:
            watched, prompt = Microscope(100), engine.tokenizer.encode("count: ")
            if watch:
                engine.watch_steps(watched)
            result = engine.submit(prompt, SamplingParams(max_tokens=max_tokens), prediction=said).result()
            texts.append(result.text)
    assert texts[0] == texts[1]
    known, at, steps = [*prompt, *result.token_ids], len(prompt), watched.steps()[::-1]
    for step in steps:  # steps without candidates are not kept
        found = [*step.before, *(step.tree.token_ids[node] for node in step.path), step.next_token]
        starts = range(at - len(step.before), len(known) - len(step.before))
        start = next(place for place in starts if known[place : place + len(found)] == found[: len(known) - place])
        at = start + len(step.before) + 1
        assert len(step.estimates) == len(step.tree)
    assert sum(len(step.path) for step in steps) > 3
