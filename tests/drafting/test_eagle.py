"""The drafter `eagle`: what it draws is what its head would draw over the whole text, and it is said how."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.published_heads import (
    COVERED,
    FORMS,
    SPECFORGE,
    SPECULATORS,
    EagleFormula,
    eagle_pair,
    random_weights,
    small_target,
    write_head,
)

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter, Draw
from precedent.drafters.model.eagle import EagleDrafter
from precedent.drafters.request import Request
from precedent.errors import ConfigError
from precedent.sampling.rng import CounterRng
from precedent.target import Slot, TargetModel
from precedent.target.head_model import HeadModel
from precedent.testing.draft_distribution import check_draft_distribution
from precedent.testing.drafter_contract import DrafterContract
from precedent.tree import ROOT, TreeBuilder, chain


def changed(config: dict[str, Any], **layers: Any) -> dict[str, Any]:
    """A config of speculators with other layers."""
    return config | {"transformer_layer_config": config["transformer_layer_config"] | layers}


VARIANTS: dict[str, dict[str, Any]] = {
    **FORMS,
    "EAGLE-3.1": SPECFORGE | {"fc_norm": True, "norm_output": True},
    "one norm before fc": SPECULATORS | {"norm_before_fc": True, "norm_before_residual": False},
    "Qwen3's layers": changed(SPECULATORS, model_type="qwen3", num_hidden_layers=2, rms_norm_eps=1e-5),
}
"""Every way in which a published head may differ."""

DRAWING = pytest.mark.parametrize("variant", ["SpecForge", "speculators", "EAGLE-3.1", "Qwen3's layers"])


@cache
def folder_of(variant: str) -> Path:
    return write_head(Path(mkdtemp()) / "head", VARIANTS[variant], random_weights(VARIANTS[variant]))


@cache
def pair(variant: str) -> tuple[TargetModel, HeadModel]:
    return eagle_pair(folder_of(variant))


@cache
def formula(variant: str) -> EagleFormula:
    config = VARIANTS[variant]
    reads = (2, 3, 4) if variant == "SafeAILab" else (1, 2, 3)  # it names none: the usual ones of 7 layers
    return EagleFormula(config, random_weights(config), small_target(), reads)


def request_on(slot: Slot, sampling: SamplingParams | None = None, mode: str = "greedy") -> Request:
    context = (*slot.token_ids, slot.pending)
    return Request("r", context, sampling or SamplingParams(), mode=mode, target_slot=lambda: slot)


def drawn(session: object, number: int = 4) -> list[int]:
    builder = TreeBuilder()
    session.draw(builder, number, CounterRng(3, 0))  # type: ignore[attr-defined]
    return list(builder.token_ids)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_computes_what_its_makers_wrote(variant: str) -> None:
    """Logits of every position equal the written-out formula, in pieces; tokens that it does not cover have none."""
    target, head = pair(variant)
    reference, ids = formula(variant), random_ids(1, 40)
    expected, _ = reference.step(reference.fused(reference.states(ids)[:-1]), ids[1:])
    place = prefilled(target, ids)
    found = []
    for start, stop in ((0, 1), (1, 20), (20, 39)):
        slot = head.new_slot()
        head.bind(slot, lambda: place)
        head.prefill(slot, ids[1 : start + 2])
        found.append(head.score([(slot, chain(ids[start + 2 : stop + 1]))])[0])
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-4)
    assert expected.isfinite().sum() == len(COVERED) * len(expected)


@DRAWING
def test_drafts_continue_from_the_heads_own_output(variant: str) -> None:
    """Step after step, whatever of a tree was accepted: as recomputed over the whole text each time."""
    target, head = pair(variant)
    reference, choose = formula(variant), random.Random(3)
    slot = prefilled(target, random_ids(3, 37))
    session = EagleDrafter(head).begin(request_on(slot))
    for step in range(4):
        assert session.behind == 36 if step == 0 else session.behind <= 4
        assert drawn(session) == reference.draws([*slot.token_ids, slot.pending], 4)
        tree = random_tree(step, 3)
        target.score([(slot, tree)])
        path, token = tree.path_to(choose.randrange(3)), choose.randrange(250)
        target.commit(slot, tree, path, token)
        session.committed([*(tree.token_ids[node] for node in path), token])


def test_accepted_drafts_are_computed_again_from_the_targets_states() -> None:
    """Entries that read the head's own output do not stay, also where every draft was accepted."""
    target, head = pair("SpecForge")
    slot = prefilled(target, random_ids(4, 20))
    session = EagleDrafter(head).begin(request_on(slot))
    for _ in range(3):
        tree = chain(drawn(session, 3))
        target.score([(slot, tree)])
        target.commit(slot, tree, [0, 1, 2], 5)
        session.committed([*tree.token_ids, 5])
        assert session.behind == 4
    assert drawn(session) == formula("SpecForge").draws([*slot.token_ids, slot.pending], 4)


def test_the_next_turn_continues_the_heads_cache() -> None:
    """Of the same tenant and the same text from its first token on; drafts are those of a fresh start."""
    target, head = pair("SpecForge")
    drafter, ids = EagleDrafter(head), random_ids(5, 60)
    first = drafter.begin(request_on(prefilled(target, ids)))
    drawn(first)
    first.end()
    again = [*ids, *random_ids(6, 8)]
    slot = prefilled(target, again)
    second = drafter.begin(request_on(slot))
    assert second.behind <= 8
    assert drawn(second) == formula("SpecForge").draws(again, 4)
    second.end()
    stranger = replace(request_on(slot), tenant="another")
    assert drafter.begin(stranger).behind == len(again) - 1


def test_a_rewound_target_is_followed() -> None:
    """A head that has drawn behind a text, and a request on the same text cut short."""
    target, head = pair("SpecForge")
    drafter, ids = EagleDrafter(head), random_ids(12, 50)
    slot = prefilled(target, ids)
    first = drafter.begin(request_on(slot))
    drawn(first)
    first.end()
    target.prefill(slot, ids[:30])
    assert drawn(drafter.begin(request_on(slot))) == formula("SpecForge").draws(ids[:30], 4)


def test_texts_longer_than_the_heads_config_names_are_drafted() -> None:
    """Published configs name 2,048 tokens beside targets of 131,072: rotary embeddings go on."""
    target, head = pair("SpecForge")
    ids = random_ids(13, 100)
    assert SPECFORGE["max_position_embeddings"] < 100 < head.context_length == target.context_length
    session = EagleDrafter(head).begin(request_on(prefilled(target, ids)))
    assert drawn(session, 2) == formula("SpecForge").draws(ids, 2)


def test_several_requests_draw_what_each_draws_alone() -> None:
    """Ragged texts, one of a single token, from which nothing can be drawn."""
    target, head = pair("speculators")
    drafter = EagleDrafter(head)
    texts = [random_ids(7, 50), random_ids(8, 1), random_ids(9, 2), random_ids(10, 13)]
    sessions = [drafter.begin(request_on(prefilled(target, text))) for text in texts]
    draws = [Draw(session, TreeBuilder(), 3, CounterRng(3, 0)) for session in sessions]
    sessions[0].draw_together(draws)
    assert [draw.error for draw in draws] == [None] * 4
    expected = [formula("speculators").draws(text, 3) if len(text) > 1 else [] for text in texts]
    assert [list(draw.builder.token_ids) for draw in draws] == expected


def test_the_reported_distribution_is_the_sampled_one() -> None:
    """Cached siblings are excluded from what is sampled and from the distribution alike."""
    target, head = pair("SpecForge")
    sampling = SamplingParams(temperature=0.8, top_k=4)
    session = EagleDrafter(head).begin(request_on(prefilled(target, random_ids(11, 12)), sampling, "traversal"))
    first = drawn(session, 1)[0]

    def drawing(builder: TreeBuilder, rng: CounterRng) -> None:
        builder.add_fixed(ROOT, first, "recall")
        session.draw(builder, 2, rng)

    check_draft_distribution(drawing)


@pytest.mark.parametrize("mode", ["traversal", "greedy", "coupled"])
def test_nothing_is_drawn_where_only_uncovered_tokens_are_allowed(mode: str) -> None:
    """A grammar may leave no token of a reduced vocabulary."""
    target, head = pair("SpecForge")

    def only_one(output: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        token = 1 if not output else 2
        return torch.full_like(row, -torch.inf).index_copy_(0, torch.tensor([token]), row[token : token + 1])

    slot = prefilled(target, random_ids(15, 12))
    sampling = SamplingParams() if mode == "greedy" else SamplingParams(temperature=1.0, seed=3)
    request = replace(request_on(slot, sampling, mode), shape=only_one)
    assert 1 not in COVERED
    assert drawn(EagleDrafter(head).begin(request)) == []


def test_a_request_without_a_place_in_the_target_is_refused() -> None:
    """There would be no states to read."""
    _, head = pair("SpecForge")
    with pytest.raises(ConfigError, match="eagle reads the hidden states of its target"):
        EagleDrafter(head).begin(Request("r", (1, 2, 3), SamplingParams()))


@cache
def place_of(prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target, _ = pair("SpecForge")
    slot = prefilled(target, list(prompt)) if prompt else target.new_slot()
    return lambda: slot


class TestEagleDrafter(DrafterContract):
    """The contract of every drafter."""

    vocab_size = 259

    def make_drafter(self) -> Drafter:
        """A head in SpecForge's format."""
        return EagleDrafter(pair("SpecForge")[1])

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(request.prompt_ids))
