"""The drafter `mtp`: what it draws is what its head would draw over the whole text, and it is said how."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.mtp_checkpoints import LIKE_DEEPSEEK, LIKE_QWEN, Reference, checkpoint, loaded
from transformers.modeling_layers import MtpModel

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter, Draw
from precedent.drafters.model.mtp import MtpDrafter
from precedent.drafters.request import Request
from precedent.errors import ConfigError
from precedent.sampling.rng import CounterRng
from precedent.target import Slot, TargetModel
from precedent.target.head_model import HeadModel
from precedent.target.mtp.model import head_beside
from precedent.testing.draft_distribution import check_draft_distribution
from precedent.testing.drafter_contract import DrafterContract
from precedent.tree import ROOT, TreeBuilder, chain

FAMILIES = pytest.mark.parametrize("model_type", [*LIKE_DEEPSEEK, *LIKE_QWEN])
TWO = pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_next"])


@cache
def folder_of(model_type: str) -> Path:
    return checkpoint(Path(mkdtemp()) / model_type, model_type)


@cache
def reference_of(model_type: str) -> Reference:
    return Reference(folder_of(model_type))


def with_head(folder: Path) -> tuple[TargetModel, HeadModel]:
    target = TargetModel(loaded(folder))
    return target, head_beside(target, draws_ahead=False)


@cache
def pair(model_type: str) -> tuple[TargetModel, HeadModel]:
    return with_head(folder_of(model_type))


def request_on(slot: Slot, sampling: SamplingParams | None = None, mode: str = "greedy") -> Request:
    context = (*slot.token_ids, slot.pending)
    return Request("r", context, sampling or SamplingParams(), mode=mode, target_slot=lambda: slot)


def drawn(session: object, number: int = 4) -> list[int]:
    builder = TreeBuilder()
    session.draw(builder, number, CounterRng(3, 0))  # type: ignore[attr-defined]
    return list(builder.token_ids)


@FAMILIES
def test_the_head_computes_what_its_makers_wrote(model_type: str) -> None:
    """Logits of every position equal the written-out formula, in pieces, in one batch and as a tree."""
    target, head = pair(model_type)
    reference, ids = reference_of(model_type), random_ids(1, 40)
    expected, _, _ = reference.step(reference.hidden(ids)[:-1], ids[1:])
    place = prefilled(target, ids)
    found = []
    for start, stop in ((0, 1), (1, 20), (20, 39)):
        slot = head.new_slot()
        head.bind(slot, lambda: place)
        head.prefill(slot, ids[1 : start + 2])
        found.append(head.score([(slot, chain(ids[start + 2 : stop + 1]))])[0])
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_the_first_draw_is_that_of_transformers(model_type: str) -> None:
    """Their own MTP model, read from the same files, gives the same logits after a text."""
    target, head = pair(model_type)
    ids = random_ids(2, 30)
    model = loaded(folder_of(model_type))
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\."]  # as published
    theirs = MtpModel.from_pretrained(model)
    with torch.inference_mode():
        hidden = model.base_model(input_ids=torch.tensor([ids[:-1]])).last_hidden_state
        after, positions = torch.tensor([ids[1:]]), torch.arange(1, len(ids))[None]
        _, expected, _ = theirs(after, hidden, torch.ones_like(after), positions, None)
    place, slot = prefilled(target, ids), head.new_slot()
    head.bind(slot, lambda: place)
    head.prefill(slot, ids[1:])
    torch.testing.assert_close(head.plain_step(slot)[0], expected[0, -1], rtol=0, atol=1e-4, check_dtype=False)


@FAMILIES
def test_drafts_continue_from_the_heads_own_output(model_type: str) -> None:
    """Step after step, whatever of a tree was accepted: as recomputed over the whole text each time."""
    target, head = pair(model_type)
    reference, choose = reference_of(model_type), random.Random(3)
    slot = prefilled(target, random_ids(3, 37))
    session = MtpDrafter(head).begin(request_on(slot))
    for step in range(5):
        assert session.behind == 36 if step == 0 else session.behind <= 4
        assert drawn(session) == reference.draws([*slot.token_ids, slot.pending], 4)
        tree = random_tree(step, 3, one_path=target.one_path)
        target.score([(slot, tree)])
        path, token = tree.path_to(choose.randrange(3)), choose.randrange(250)
        target.commit(slot, tree, path, token)
        session.committed([*(tree.token_ids[node] for node in path), token])


@TWO
def test_accepted_drafts_are_computed_again_from_the_targets_states(model_type: str) -> None:
    """Entries that read the head's own output do not stay, also where every draft was accepted."""
    target, head = pair(model_type)
    slot = prefilled(target, random_ids(4, 20))
    session = MtpDrafter(head).begin(request_on(slot))
    for _ in range(3):
        tree = chain(drawn(session, 3))
        target.score([(slot, tree)])
        target.commit(slot, tree, [0, 1, 2], 5)
        session.committed([*tree.token_ids, 5])
        assert session.behind == 4
    assert drawn(session) == reference_of(model_type).draws([*slot.token_ids, slot.pending], 4)


@TWO
def test_the_next_turn_continues_the_heads_cache(model_type: str) -> None:
    """Of the same tenant and the same text from its first token on; drafts are those of a fresh start."""
    target, head = pair(model_type)
    drafter, ids = MtpDrafter(head), random_ids(5, 60)
    first = drafter.begin(request_on(prefilled(target, ids)))
    drawn(first)
    first.end()
    again = [*ids, *random_ids(6, 8)]
    slot = prefilled(target, again)
    second = drafter.begin(request_on(slot))
    assert second.behind <= 8
    assert drawn(second) == reference_of(model_type).draws(again, 4)
    second.end()
    other = prefilled(target, [(again[0] + 1) % 250, *again[1:]])
    assert drafter.begin(request_on(other)).behind == len(again) - 1
    stranger = replace(request_on(slot), tenant="another")
    assert drafter.begin(stranger).behind == len(again) - 1


@TWO
def test_drafted_entries_are_lent_to_nobody(model_type: str) -> None:
    """A request whose prompt is another's text with its drafts, while that one still runs."""
    target, head = pair(model_type)
    drafter, ids = MtpDrafter(head), random_ids(14, 20)
    first = drafter.begin(request_on(prefilled(target, ids)))
    longer = [*ids, *drawn(first), 7]
    second = drafter.begin(request_on(prefilled(target, longer)))
    assert second.behind == len(longer) - 1
    assert drawn(second) == reference_of(model_type).draws(longer, 4)


@TWO
def test_several_requests_draw_what_each_draws_alone(model_type: str) -> None:
    """Ragged texts, one of a single token, from which nothing can be drawn."""
    target, head = pair(model_type)
    drafter = MtpDrafter(head)
    texts = [random_ids(7, 50), random_ids(8, 1), random_ids(9, 2), random_ids(10, 13)]
    sessions = [drafter.begin(request_on(prefilled(target, text))) for text in texts]
    draws = [Draw(session, TreeBuilder(), 3, CounterRng(3, 0)) for session in sessions]
    sessions[0].draw_together(draws)
    assert [draw.error for draw in draws] == [None] * 4
    expected = [reference_of(model_type).draws(text, 3) if len(text) > 1 else [] for text in texts]
    assert [list(draw.builder.token_ids) for draw in draws] == expected


@TWO
def test_the_reported_distribution_is_the_sampled_one(model_type: str) -> None:
    """Cached siblings are excluded from what is sampled and from the distribution alike."""
    target, head = pair(model_type)
    sampling = SamplingParams(temperature=0.8, top_k=4)
    session = MtpDrafter(head).begin(request_on(prefilled(target, random_ids(11, 12)), sampling, "traversal"))
    first = drawn(session, 1)[0]

    def drawing(builder: TreeBuilder, rng: CounterRng) -> None:
        builder.add_fixed(ROOT, first, "recall")
        session.draw(builder, 2, rng)

    check_draft_distribution(drawing)


def test_a_request_without_a_place_in_the_target_is_refused() -> None:
    """There would be no hidden states to read."""
    _, head = pair("glm4_moe")
    with pytest.raises(ConfigError, match="mtp reads the hidden states of its target"):
        MtpDrafter(head).begin(Request("r", (1, 2, 3), SamplingParams()))


@cache
def place_of(prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = pair("glm4_moe")
    slot = prefilled(target, list(prompt)) if prompt else target.new_slot()
    return lambda: slot


class TestMtpDrafter(DrafterContract):
    """The contract of every drafter."""

    vocab_size = 259

    def make_drafter(self) -> Drafter:
        """The head of a tiny GLM-4 MoE."""
        return MtpDrafter(pair("glm4_moe")[1])

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(request.prompt_ids))
