"""Streamers hear what they hear from `generate`; what breaks in the middle leaves the next call as it was."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.generating import NEW, PROMPT, Listener, prompts
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import precedent
from precedent_testing.drafters import NullDrafter


def test_a_streamer_hears_what_it_hears_from_generate(model: PreTrainedModel) -> None:
    settings = {"max_new_tokens": 12, "do_sample": False}
    theirs, mine = Listener(), Listener()
    model.generate(**prompts(PROMPT), **settings, streamer=theirs)
    model.generate(**prompts(PROMPT), **settings, streamer=mine, custom_generate=precedent.generate)
    assert mine.heard == theirs.heard
    assert mine.heard[-1] == "end"


class Interrupting(StoppingCriteria):
    """A criterion that breaks at its n-th question."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.left -= 1
        if self.left <= 0:
            raise KeyError("criterion")
        return False


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_what_breaks_in_the_middle_leaves_the_next_call_as_it_was(model: PreTrainedModel, at: int) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**prompts(PROMPT), **settings)
    ended = Watched()
    with pytest.raises(KeyError, match="criterion"):
        model.generate(
            **prompts(PROMPT),
            **settings,
            custom_generate=precedent.generate,
            drafters=[ended],
            stopping_criteria=StoppingCriteriaList([Interrupting(at)]),
        )
    assert ended.ended == 1
    with pytest.raises(OSError, match="nobody listens"):
        model.generate(**prompts(PROMPT), **settings, custom_generate=precedent.generate, streamer=Listener(at))
    ours = model.generate(**prompts(PROMPT), **settings, custom_generate=precedent.generate)
    assert ours.tolist() == expected.tolist()


class Watched(NullDrafter):
    """Counts the requests that were ended."""

    ended = 0

    def begin(self, request: Any) -> Any:
        session, outer = super().begin(request), self
        end = session.end

        def noted() -> None:
            outer.ended += 1
            end()

        session.end = noted
        return session
