"""Drafters that copy: from the prompt, from the caller's prediction, from templates, and what a grammar forces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from torch import Tensor

from precedent.config import SamplingParams
from precedent.drafters import Candidates, DraftSession, Request
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.templates import PromptValues, TemplateDrafter
from precedent.sampling.constraints import Chain, repetition_penalty
from precedent.text.codec import TokenizerCodec
from precedent.text.templates import Hole, Template, Templates
from precedent.tree import ROOT
from precedent_testing.tiny_models import byte_tokenizer

END = 2


def request(prompt: Iterable[int] = (1, 2, 3), end: int | None = END, **given: Any) -> Request:
    return Request("r", tuple(prompt), SamplingParams(), end_token_ids=frozenset({end} - {None}), **given)


def length_of_path(candidates: Candidates, wanted: Sequence[int]) -> int:
    """How many of the wanted tokens the candidates hold as a path."""
    nodes = {edge: node for node, edge in enumerate(zip(candidates.parents, candidates.token_ids, strict=True))}
    above = ROOT
    for count, token in enumerate(wanted):
        if (above, token) not in nodes:
            return count
        above = nodes[above, token]
    return len(wanted)


def steps(session: DraftSession, answer: Sequence[int], budget: int = 32) -> list[int]:
    """Tokens accepted in each step, when the target wants this answer."""
    accepted, at = [], 0
    while at < len(answer):
        number = length_of_path(session.match(budget), answer[at:])
        session.committed(answer[at : at + number + 1])
        accepted.append(number)
        at += number + 1
    return accepted


# The prompt


def test_the_prompt_drafter_copies_slot_values() -> None:
    """What followed the same words in the prompt is proposed, the newest first, and the output counts as well."""
    session = PromptDrafter().begin(request((10, 11, 40, 41, 42, 50, 10, 11, 43, 44, 45)))
    assert len(session.match(8)) == 0
    session.committed([90, 10, 11])
    found = session.match(16)
    assert [length_of_path(found, path) for path in ((43, 44, 45), (40, 41, 42))] == [3, 3]
    assert found.token_ids[0] == 43
    session.committed([43, 80, 81, 82, 10, 11, 43])
    assert length_of_path(session.match(16), (80, 81, 82)) == 3


def test_one_longer_match_in_the_prompt_outweighs_many_shorter_ones() -> None:
    session = PromptDrafter().begin(request((90, 11, 20) * 10 + (10, 11, 30, 91)))
    session.committed([10, 11])
    assert session.match(16).token_ids[0] == 30


# A prediction


def predicted(prediction: Sequence[int]) -> DraftSession:
    return PredictionDrafter().begin(request(prediction=tuple(prediction)))


def test_a_right_prediction_is_followed_from_the_first_token_to_the_end() -> None:
    answer = [*range(100, 150), END]
    assert steps(predicted(answer), answer) == [32, 18]
    session = predicted(())
    session.committed([5])
    assert len(session.match(8)) == 0


def test_the_prediction_is_found_again_behind_every_kind_of_edit() -> None:
    """A replaced, an inserted and a deleted passage cost a few steps, not the rest of the answer."""
    prediction = [*range(100, 200), END]
    answer = [*range(100, 130), 7, 8, 9, *range(133, 150), 10, 11, 12, 13, *range(150, 170), *range(180, 200), END]
    accepted = steps(predicted(prediction), answer, budget=64)
    assert sum(accepted) >= len(answer) - 14
    assert len(accepted) <= 14


# Templates

CODEC = TokenizerCodec(byte_tokenizer())


def templated(templates: Sequence[str | Template], prompt: str = "", codec: TokenizerCodec = CODEC) -> DraftSession:
    given = request(codec.encode(prompt), codec.end_token_id, templates=tuple(Templates(templates)))
    return TemplateDrafter(codec).begin(given)


def accepted_of(session: DraftSession, answer: str, codec: TokenizerCodec = CODEC) -> list[int]:
    """Accepted tokens per step for a text that then ends."""
    return steps(session, codec.answer_ids(answer), budget=64)


def test_a_value_of_the_prompt_fills_its_hole() -> None:
    """The id that the user named is proposed; another one costs the value only."""
    template, prompt = "Document {document_id} is open now.", "Please open document D-104."
    assert accepted_of(templated([template], prompt), "Document D-104 is open now.") == [28]
    accepted = accepted_of(templated([template], prompt), "Document D-977 is open now.")
    assert accepted[0] == len("Document D-")
    assert accepted[-1] >= len("is open now.")
    assert len(templated([], prompt).match(8)) == 0


def test_nothing_is_ever_proposed_from_inside_an_open_hole() -> None:
    found = templated(["Hello {name}, welcome."]).match(64)
    assert CODEC.decode(found.token_ids) == "Hello "


def test_tokens_that_could_merge_with_a_hole_are_left_to_the_model() -> None:
    """A blank that joins with some values; a known value is written as the tokenizer writes it in its place."""
    codec = TokenizerCodec(byte_tokenizer((("Ġ", "a"), ("Ġ", "Q"), ('"', "}"))))
    assert codec.decode(templated(["Hello {name}!"], codec=codec).match(64).token_ids) == "Hello"
    assert accepted_of(templated(["Hello {name}!"], codec=codec), "Hello all!", codec)[0] == 5
    answer = codec.answer_ids("Say a1 now")
    assert len(answer) == 10  # " a" is one token
    assert steps(templated(["Say {greeting_id} now"], "Use a1.", codec), answer, budget=64) == [10]


@pytest.mark.parametrize(
    ("hole", "text", "values"),
    [
        (Hole("document_id", "string"), "open D-104, then D-7", ["D-7", "D-104"]),
        (Hole("document_id", "string"), '{"document_id": "plan"} and {"id": "x9"}', ["x9", "plan"]),
        (Hole("order_id", "string"), '{"name": "open", "status": "new"}', []),
        (Hole("email", "string"), "write to ada@example.com or bo.b@x.org.", ["bo.b@x.org", "ada@example.com"]),
        (Hole("pages", "number"), "3 pages of D-104, then 12.5 more", ["12.5", "3"]),
        (Hole("pages", "number"), '{"pages": 41, "title": "X"}', ["41"]),
        (Hole("title", "string"), "call it 'Plan \\ B'", ["Plan \\\\ B"]),
        (Hole("title", "string"), '{"title": "say \\"hi\\""}', ['say \\"hi\\"']),
        (Hole("title"), '{"title": "say \\"hi\\""}', ['say "hi"']),
        (Hole("value", "json"), '{"value": "red"} {"value": 7}', ["7", '"red"']),
    ],
)
def test_values_are_found_by_key_and_by_looks_the_latest_first(hole: Hole, text: str, values: list[str]) -> None:
    assert PromptValues(text).of(hole, 4) == values


# A grammar


class Forcing:
    """A constraint that forces 5, nothing, then 7 and the end, behind which it claims to know more."""

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        return row

    def forced(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        return ((5,), (), (7, END, 8))[len(output_ids) % 3]


@pytest.mark.parametrize(
    "shape",
    [Forcing(), Chain([repetition_penalty((2,), 1.5), Chain([Forcing()]), repetition_penalty((1,), 1.5)])],
    ids=["alone", "in a chain"],
)
def test_forced_tokens_are_a_chain_up_to_the_end_and_nearly_certain(shape: Any) -> None:
    session = GrammarDrafter().begin(request(shape=shape))
    assert session.match(8).token_ids == [5]
    session.committed([5, 6])
    found = session.match(8)
    assert (found.token_ids, found.parents) == ([7, END], [-1, 0])
    assert min(found.estimates) > 0.99
    assert session.match(1).token_ids == [7]
