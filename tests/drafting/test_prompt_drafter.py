"""The drafter that looks things up in the live prompt."""

from __future__ import annotations

from helpers.listed_completions import first_path, paths, request

from precedent.drafters.base import Drafter
from precedent.drafters.prompt import PromptDrafter
from precedent_testing.drafter_contract import DrafterContract


class TestPromptContract(DrafterContract):
    """Prompt lookup keeps the drafter contract."""

    def make_drafter(self) -> Drafter:
        """It needs nothing."""
        return PromptDrafter()


def test_the_prompt_drafter_copies_slot_values() -> None:
    """What followed the same words in the prompt is proposed, the newest first, and the output counts as well."""
    prompt = (10, 11, 40, 41, 42, 50, 10, 11, 43, 44, 45)
    session = PromptDrafter().begin(request(prompt))
    session.committed([90, 10, 11])
    found = session.match(16)
    assert first_path(found)[:3] == [43, 44, 45]
    assert (40, 41, 42) in paths(found)
    session.committed([43, 80, 81, 82, 10, 11, 43])
    assert (80, 81, 82) in paths(session.match(16))


def test_the_prompt_drafter_finds_nothing_in_new_words() -> None:
    """No repetition, no candidates."""
    session = PromptDrafter().begin(request((1, 3, 4, 5)))
    assert len(session.match(8)) == 0
    session.committed([6])
    assert len(session.match(8)) == 0
