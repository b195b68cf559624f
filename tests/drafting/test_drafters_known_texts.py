"""The drafters that know texts beforehand: the caller's prediction, and templates with values from the live prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from precedent.config import SamplingParams
from precedent.drafters.base import Candidates, Drafter, DraftSession
from precedent.drafters.prediction import PredictionDrafter
from precedent.drafters.request import Request
from precedent.drafters.templates import PromptValues, TemplateDrafter
from precedent.text.codec import TokenizerCodec
from precedent.text.templates import Hole, Template, Templates
from precedent.tree import ROOT
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer

END = 2


class LetterCodec:
    """Token 5 is "a", 6 is "b", and so on; 2 ends an answer."""

    end_token_id = END

    def encode(self, text: str) -> list[int]:
        """One token per letter."""
        return [ord(letter) - ord("a") + 5 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        """One letter per token."""
        return "".join(chr(token - 5 + ord("a")) for token in token_ids)


class TestPredictionContract(DrafterContract):
    """A prediction with edits ahead of it keeps the drafter contract."""

    def make_drafter(self) -> Drafter:
        """It needs nothing."""
        return PredictionDrafter()

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """The prediction differs from the output in its third token."""
        return dataclasses.replace(super().make_request(prompt_ids), prediction=(5, 6, 11, 8, 9, 5, 6, 7, 2))


class TestTemplateContract(DrafterContract):
    """Templates of the request and of the drafter keep the drafter contract."""

    def make_drafter(self) -> Drafter:
        """One template of its own."""
        return TemplateDrafter(LetterCodec(), ["abc{x}eab"])

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """Another template, with choices, comes with the request."""
        template = Template.parse("ab{y}de", {"y": ["c", "f"]})
        return dataclasses.replace(super().make_request(prompt_ids), templates=(template,))


def predicted(prediction: Sequence[int]) -> DraftSession:
    """A drafting for a request with this prediction."""
    return PredictionDrafter().begin(
        Request("r", (1, 2, 3), SamplingParams(), prediction=tuple(prediction), end_token_ids=frozenset({END}))
    )


def steps(session: DraftSession, answer: Sequence[int], budget: int = 32) -> list[int]:
    """Tokens accepted in each step, when the target wants this answer."""
    accepted, at = [], 0
    while at < len(answer):
        number = length_of_path(session.match(budget), answer[at:])
        session.committed(answer[at : at + number + 1])
        accepted.append(number)
        at += number + 1
    return accepted


def length_of_path(candidates: Candidates, wanted: Sequence[int]) -> int:
    """How many of the wanted tokens the candidates hold as a path."""
    above = ROOT
    for count, token in enumerate(wanted):
        edges = zip(candidates.parents, candidates.token_ids, strict=True)
        found = [node for node, edge in enumerate(edges) if edge == (above, token)]
        if not found:
            return count
        above = found[0]
    return len(wanted)


def test_without_a_prediction_nothing_is_proposed() -> None:
    session = predicted(())
    assert len(session.match(8)) == 0
    session.committed([5])
    assert len(session.match(8)) == 0


def test_a_right_prediction_is_followed_from_the_first_token_to_the_end() -> None:
    answer = [*range(100, 150), END]
    assert steps(predicted(answer), answer) == [32, 18]


def test_the_prediction_is_found_again_behind_every_kind_of_edit() -> None:
    """A replaced, an inserted and a deleted passage cost a few steps, not the rest of the answer."""
    prediction = [*range(100, 200), END]
    answer = [*range(100, 130), 7, 8, 9, *range(133, 150), 10, 11, 12, 13, *range(150, 170), *range(180, 200), END]
    accepted = steps(predicted(prediction), answer, budget=64)
    assert sum(accepted) >= len(answer) - 14
    assert len(accepted) <= 14


def test_where_lines_repeat_the_place_in_the_prediction_decides() -> None:
    """Twenty passages begin alike and end differently; the one behind the last is followed."""
    passages = [[50, 51, 52, 53, 200 + number] for number in range(20)]
    prediction = [token for passage in passages for token in passage]
    session = predicted(prediction)
    answer = [*prediction[:42], 99, *prediction[43:]]  # an edit in the ninth passage
    assert len(steps(session, answer)) <= 6


def template_drafting(
    templates: Sequence[str | Template], prompt: str = "", *, codec: TokenizerCodec | None = None
) -> DraftSession:
    """A drafting over bytes for a request with these templates."""
    codec = codec or CODEC
    end = frozenset({codec.end_token_id}) if codec.end_token_id is not None else frozenset()
    request = Request("r", tuple(codec.encode(prompt)), SamplingParams(), end_token_ids=end)
    return TemplateDrafter(codec).begin(dataclasses.replace(request, templates=tuple(Templates(templates))))


CODEC = TokenizerCodec(byte_tokenizer())


def accepted_of(session: DraftSession, answer: str, codec: TokenizerCodec = CODEC) -> list[int]:
    """Accepted tokens per step for a text that then ends."""
    return steps(session, codec.answer_ids(answer), budget=64)


def test_nothing_is_proposed_without_templates() -> None:
    assert len(template_drafting([], "Open D-1.").match(8)) == 0


def test_a_value_of_the_prompt_fills_its_hole() -> None:
    """The id that the user named is proposed where the template has its hole, and the text goes on behind it."""
    session = template_drafting(["Document {document_id} is open."], "Please open document D-104.")
    assert accepted_of(session, "Document D-104 is open.") == [24]


def test_behind_a_value_that_nobody_knew_the_template_goes_on() -> None:
    """The model writes the value itself; the first byte behind it brings the literal back."""
    session = template_drafting(["Document {document_id} is open now."], "Please open it.")
    accepted = accepted_of(session, "Document xyz is open now.")
    assert accepted[0] == len("Document ")
    assert accepted[-1] >= len("is open now.")
    assert len(accepted) <= 5


def test_another_value_than_the_proposed_one_costs_the_value_only() -> None:
    session = template_drafting(["Document {document_id} is open now."], "Please open document D-104.")
    accepted = accepted_of(session, "Document D-977 is open now.")
    assert accepted[0] == len("Document D-")
    assert accepted[-1] >= len("is open now.")


def test_nothing_is_ever_proposed_from_inside_an_open_hole() -> None:
    """Candidates stop before the hole: what stands in it is unknown, and so is when it ends."""
    codec = CODEC
    found = template_drafting(["Hello {name}, welcome."]).match(64)
    assert codec.decode(found.token_ids) == "Hello "
    assert max(found.token_ids) < 300


def test_choices_are_branches() -> None:
    template = Template.parse("It is {state} now.", {"state": ["open", "deleted"]})
    for state in template.holes[0].choices:
        assert accepted_of(template_drafting([template]), f"It is {state} now.")[0] == len(f"It is {state} now.") + 1


def test_values_are_calibrated_apart_from_the_words_around_them() -> None:
    """A hole's value is less sure than the literal before it, and has a calibration bin of its own."""
    found = template_drafting(["Document {document_id} is open."], "Open D-104.").match(64)
    sure, guessed = found.nodes[len("Document ") - 1], found.nodes[len("Document ")]
    assert guessed["estimate"] < sure["estimate"]
    assert {int(sure["bin"]) % 6, int(guessed["bin"]) % 6} == {0, 2}


def merging_codec() -> TokenizerCodec:
    """Bytes, of which a blank joins with a following D, and a quotation mark with a brace behind it."""
    return TokenizerCodec(byte_tokenizer((("Ġ", "a"), ("Ġ", "Q"), ('"', "}"))))


def test_a_token_that_could_merge_with_the_hole_is_not_proposed() -> None:
    """The blank before the hole becomes part of the value's first token for some values: it is left to the model."""
    codec = merging_codec()
    found = template_drafting(["Hello {name}!"], codec=codec).match(64)
    assert codec.decode(found.token_ids) == "Hello"
    assert accepted_of(template_drafting(["Hello {name}!"], codec=codec), "Hello all!", codec)[0] == 5


def test_a_known_value_is_written_as_the_tokenizer_writes_it_in_its_place() -> None:
    codec = merging_codec()
    session = template_drafting(["Say {greeting_id} now"], "Use a1.", codec=codec)
    answer = codec.answer_ids("Say a1 now")
    assert len(answer) == 10  # " a" is one token
    assert steps(session, answer, budget=64) == [10]


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


def test_many_templates_stay_bounded() -> None:
    """A hundred templates with two holes and many values in the prompt: few texts, and the right one is found."""
    templates = [f"Action number {number} on {{document_id}} for {{user_id}}." for number in range(100)]
    session = template_drafting(templates, " ".join(f"D-{number} u{number}" for number in range(50)))
    accepted = accepted_of(session, "Action number 37 on D-5 for u8.")
    assert sum(accepted) >= 20
