"""The contract of every draft head: what it draws is what its makers' formula gives over the whole text.

EAGLE-3 heads in each published variant, MTP heads of each family, and drafts trained with `--condition target`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers.conditioned import opinionated_weights, random_conditioned
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.mtp_checkpoints import LIKE_DEEPSEEK, LIKE_QWEN, Reference, checkpoint, loaded
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
from torch import Tensor
from transformers.modeling_layers import MtpModel

from precedent.config import SamplingParams
from precedent.drafters.base import Drafter
from precedent.drafters.request import Request
from precedent.errors import ConfigError
from precedent.sampling.rng import CounterRng
from precedent.target import Slot, TargetModel
from precedent.tree import TreeBuilder, chain
from precedent_drafts.heads import HeadDrafter, HeadModel, reading_hidden_states
from precedent_drafts.mtp import mtp_beside
from precedent_drafts.trained import TOKEN_GUIDED
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import tiny_causal_lm


def changed(config: dict[str, Any], **layers: Any) -> dict[str, Any]:
    """A config of speculators with other layers."""
    return config | {"transformer_layer_config": config["transformer_layer_config"] | layers}


VARIANTS: dict[str, dict[str, Any]] = {
    **FORMS,
    "EAGLE-3.1": SPECFORGE | {"fc_norm": True, "norm_output": True},
    "one norm before fc": SPECULATORS | {"norm_before_fc": True, "norm_before_residual": False},
    "Qwen3's layers": changed(SPECULATORS, model_type="qwen3", num_hidden_layers=2, rms_norm_eps=1e-5),
}
"""Every way in which a published EAGLE head may differ."""

FAMILIES = (*LIKE_DEEPSEEK, *LIKE_QWEN)
CONDITIONED = "conditioned"

WITH_FORMULA = pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
DRAWING = pytest.mark.parametrize("name", ["SpecForge", "speculators", "EAGLE-3.1", "Qwen3's layers", *FAMILIES])
FEW = pytest.mark.parametrize("name", ["SpecForge", "glm4_moe", "qwen3_next"])
EACH = pytest.mark.parametrize("name", ["SpecForge", "glm4_moe", CONDITIONED])
"""One of each kind."""


@dataclass(frozen=True)
class Head:
    """A head beside its target, the name of its drafter, and the written-out formula where there is one."""

    drafter_name: str
    target: TargetModel
    model: HeadModel
    formula: Any = None

    def drafter(self) -> HeadDrafter:
        return HeadDrafter(self.drafter_name, self.model)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits behind every token but the first, by the formula."""
        found: Tensor
        if self.drafter_name == "eagle":
            found, _ = self.formula.step(self.formula.fused(self.formula.states(ids)[:-1]), ids[1:])
        else:
            found, _, _ = self.formula.step(self.formula.hidden(ids)[:-1], ids[1:])
        return found


@cache
def checkpoint_of(family: str) -> Path:
    return checkpoint(Path(mkdtemp()) / family, family)


@cache
def head_of(name: str) -> Head:
    if name in VARIANTS:
        config = VARIANTS[name]
        folder = write_head(Path(mkdtemp()) / "head", config, random_weights(config))
        reads = (2, 3, 4) if name == "SafeAILab" else (1, 2, 3)  # it names none: the usual ones of 7 layers
        formula = EagleFormula(config, random_weights(config), small_target(), reads)
        return Head("eagle", *eagle_pair(folder), formula)
    if name == CONDITIONED:
        model = tiny_causal_lm("llama", vocab_size=259, num_hidden_layers=3, hidden_size=16, seed=31)
        weights = opinionated_weights(model, 2, TOKEN_GUIDED, range(259))
        target, draft = TargetModel(model), random_conditioned(model, (2,), TOKEN_GUIDED, weights)
        return Head("draft-model", target, reading_hidden_states(draft, target, feeds_back_normed=True))
    target = TargetModel(loaded(checkpoint_of(name)))
    return Head("mtp", target, mtp_beside(target), Reference(checkpoint_of(name)))


def request_on(slot: Slot, sampling: SamplingParams | None = None, mode: str = "greedy") -> Request:
    context = (*slot.token_ids, slot.pending)
    return Request("r", context, sampling or SamplingParams(), mode=mode, target_slot=lambda: slot)


def drawn(session: Any, number: int = 4) -> list[int]:
    builder = TreeBuilder()
    session.draw(builder, number, CounterRng(3, 0))
    return list(builder.token_ids)


@WITH_FORMULA
@pytest.mark.sampled(5)
def test_a_head_computes_what_its_makers_wrote(name: str) -> None:
    """Logits of every position equal the formula, in pieces; tokens that it does not cover have none."""
    head, ids = head_of(name), random_ids(1, 40)
    expected, place, found = head.logits(ids), prefilled(head.target, ids), []
    for start, stop in ((0, 1), (1, 20), (20, 39)):
        slot = head.model.new_slot()
        head.model.bind(slot, lambda: place)
        head.model.prefill(slot, ids[1 : start + 2])
        found.append(head.model.score([(slot, chain(ids[start + 2 : stop + 1]))])[0])
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-4)
    covered = len(COVERED) if name in VARIANTS else expected.shape[1]
    assert expected.isfinite().sum() == covered * len(expected)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_an_mtp_heads_first_draw_is_that_of_transformers(family: str) -> None:
    """Their own MTP model, read from the same files, gives the same logits after a text."""
    head, ids, model = head_of(family), random_ids(2, 30), loaded(checkpoint_of(family))
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\."]  # as published
    theirs = MtpModel.from_pretrained(model)
    with torch.inference_mode():
        hidden = model.base_model(input_ids=torch.tensor([ids[:-1]])).last_hidden_state
        after, positions = torch.tensor([ids[1:]]), torch.arange(1, len(ids))[None]
        _, expected, _ = theirs(after, hidden, torch.ones_like(after), positions, None)
    place, slot = prefilled(head.target, ids), head.model.new_slot()
    head.model.bind(slot, lambda: place)
    head.model.prefill(slot, ids[1:])
    found = head.model.plain_step(slot)[0]
    torch.testing.assert_close(found, expected[0, -1], rtol=0, atol=1e-4, check_dtype=False)


@DRAWING
def test_drafts_continue_from_the_heads_own_output(name: str) -> None:
    """Step after step, whatever of a tree was accepted: as recomputed over the whole text each time."""
    head, choose = head_of(name), random.Random(3)
    target, slot = head.target, prefilled(head.target, random_ids(3, 37))
    session = head.drafter().begin(request_on(slot))
    for step in range(5):
        assert session.behind == 36 if step == 0 else session.behind <= 4
        assert drawn(session) == head.formula.draws([*slot.token_ids, slot.pending], 4)
        tree = random_tree(step, 3, one_path=target.one_path)
        target.score([(slot, tree)])
        path, token = tree.path_to(choose.randrange(3)), choose.randrange(250)
        target.commit(slot, tree, path, token)
        session.committed([*(tree.token_ids[node] for node in path), token])


@FEW
def test_the_next_turn_continues_the_heads_cache(name: str) -> None:
    """Of the same tenant and the same text from its first token on; drafts are those of a fresh start."""
    head, ids = head_of(name), random_ids(5, 60)
    drafter = head.drafter()
    first = drafter.begin(request_on(prefilled(head.target, ids)))
    drawn(first)
    first.end()
    again = [*ids, *random_ids(6, 8)]
    slot = prefilled(head.target, again)
    second = drafter.begin(request_on(slot))
    assert second.behind <= 8
    assert drawn(second) == head.formula.draws(again, 4)
    second.end()
    other = prefilled(head.target, [(again[0] + 1) % 250, *again[1:]])
    assert drafter.begin(request_on(other)).behind == len(again) - 1
    stranger = replace(request_on(slot), tenant="another")
    assert drafter.begin(stranger).behind == len(again) - 1


def test_texts_longer_than_the_heads_config_names_are_drafted() -> None:
    """Published configs name 2,048 tokens beside targets of 131,072: rotary embeddings go on."""
    head, ids = head_of("SpecForge"), random_ids(13, 100)
    assert SPECFORGE["max_position_embeddings"] < 100 < head.model.context_length == head.target.context_length
    session = head.drafter().begin(request_on(prefilled(head.target, ids)))
    assert drawn(session, 2) == head.formula.draws(ids, 2)


@pytest.mark.parametrize("mode", ["traversal", "greedy", "coupled"])
def test_nothing_is_drawn_where_only_uncovered_tokens_are_allowed(mode: str) -> None:
    """A grammar may leave no token of a reduced vocabulary."""
    head = head_of("SpecForge")

    def only_one(output: Sequence[int], row: Tensor) -> Tensor:
        token = 1 if not output else 2
        return torch.full_like(row, -torch.inf).index_copy_(0, torch.tensor([token]), row[token : token + 1])

    sampling = SamplingParams() if mode == "greedy" else SamplingParams(temperature=1.0, seed=3)
    request = request_on(prefilled(head.target, random_ids(15, 12)), sampling, mode)
    assert 1 not in COVERED
    assert drawn(head.drafter().begin(replace(request, shape=only_one))) == []


@EACH
def test_a_request_without_a_place_in_the_target_is_refused(name: str) -> None:
    """There would be no states to read."""
    head = head_of(name)
    with pytest.raises(ConfigError, match=f"{head.drafter_name} reads the hidden states of its target"):
        head.drafter().begin(Request("r", (1, 2, 3), SamplingParams()))


@cache
def place_of(name: str, prompt: tuple[int, ...]) -> Callable[[], Slot]:
    """Where the target has computed this prompt: one function for each, so that equal requests are equal."""
    target = head_of(name).target
    slot = prefilled(target, list(prompt)) if prompt else target.new_slot()
    return lambda: slot


@EACH
class TestHeadDrafter(DrafterContract):
    """The contract of every drafter."""

    vocab_size = 259

    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self.name = name

    def make_drafter(self) -> Drafter:
        return head_of(self.name).drafter()

    def make_request(self, prompt_ids: Sequence[int] | None = None) -> Request:
        """A request whose prompt the target has computed."""
        request = super().make_request(prompt_ids)
        return replace(request, target_slot=place_of(self.name, request.prompt_ids))
