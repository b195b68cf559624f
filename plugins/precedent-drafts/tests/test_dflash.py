"""Published DFlash drafts run as block drafts: what a block believes, whole answers, and refusals."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hybrids import prefilled, random_ids, random_tree
from helpers.published_blocks import FORMS, MASK, SPECULATORS, ZLAB, BlockFormula, block_weights
from helpers.published_heads import COVERED, write_head

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.drafters.request import Request
from precedent.errors import ConfigError, GenerationError, ModelLoadError, UnsupportedError
from precedent.target import TargetModel
from precedent_drafts.block_draft import BlockDraft
from precedent_drafts.block_drafter import BlockDrafter, chances
from precedent_drafts.block_model import BlockModel, Filled
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

BLOCK = SpeculationConfig(drafters=("block-draft",))


def own_tokens(form: str) -> tuple[int, ...] | None:
    """The tokens of a head of its own: z-lab's drafts share the target's."""
    return COVERED if form == "speculators" else None


def with_layers(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A config whose layers have other settings, wherever its format keeps them."""
    name = "transformer_layer_config"
    return config | ({name: config[name] | settings} if name in config else settings)


def loaded(folder: Path, model: Any) -> BlockDraft:
    draft = load_draft(folder, model, byte_tokenizer())
    assert isinstance(draft, BlockDraft)
    return draft


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "use_sliding_window": True}


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full attention", "a window"])
@pytest.mark.parametrize("form", FORMS)
def test_a_block_is_what_its_makers_wrote(form: str, windows: dict[str, Any], tmp_path: Path) -> None:
    """Behind a whole prompt and after commits of any size, for several requests in one forward.

    Texts are shorter than a window and longer.
    """
    config, weights = with_layers(FORMS[form], windows), block_weights(FORMS[form], own_tokens(form))
    target = TargetModel(tiny_causal_lm(scale=1.5, num_hidden_layers=4))
    model = BlockModel(loaded(write_head(tmp_path, config, weights), target.model), target)
    formula = BlockFormula(config, weights, tiny_causal_lm(scale=1.5, num_hidden_layers=4), (1, 3))
    assert model.token_ids.tolist() == list(own_tokens(form) or range(259))
    choose = random.Random(3)
    slots = [prefilled(target, random_ids(seed, count)) for seed, count in ((1, 90), (2, 1), (3, 9))]
    places = [model.place_beside(lambda slot=slot: slot, len(slot.token_ids) + 1) for slot in slots]  # type: ignore[misc]
    assert [place.first for place in places] == [0, 0, 0], "it reads the whole text"
    for step in range(2):
        filled = model.fill([(place, slot.pending) for place, slot in zip(places, slots, strict=True)])
        for slot, block in zip(slots, filled, strict=True):
            expected = formula.block([*slot.token_ids, slot.pending])
            assert block.logits.shape == (4, len(own_tokens(form) or range(259)))
            torch.testing.assert_close(block.logits.double(), expected, rtol=0, atol=1e-4)
            tree = random_tree(step, 3)
            target.score([(slot, tree)])
            target.commit(slot, tree, tree.path_to(choose.randrange(3)), choose.randrange(250))


def test_candidates_are_the_target_s_tokens(tmp_path: Path) -> None:
    """Rows of a reduced head stand for the tokens that d2t names."""
    folder = write_head(tmp_path, SPECULATORS, block_weights(SPECULATORS, COVERED))
    target = TargetModel(tiny_causal_lm(scale=1.5, num_hidden_layers=4))
    drafter = BlockDrafter(BlockModel(loaded(folder, target.model), target))
    slot = prefilled(target, random_ids(4, 20))
    request = Request("r", (*slot.token_ids, slot.pending), SamplingParams(), target_slot=lambda: slot)
    candidates = drafter.begin(request).match(12)
    assert len(candidates) == 12
    assert set(candidates.token_ids) <= set(COVERED)


def test_chances_without_a_markov_term_are_those_of_one_that_says_nothing() -> None:
    """Over a vocabulary that the tokenizer does not fill, at any temperature; NaN is an error either way."""
    block = Filled(torch.randn(5, 60, dtype=torch.float64) * 3, torch.full((5,), 0.5))
    ids = torch.arange(0, 120, 2)

    def model(rank: int) -> Any:
        left, right = torch.zeros(61, rank, dtype=torch.float64), torch.zeros(rank, 60, dtype=torch.float64)
        settings = SimpleNamespace(markov_rank=rank)
        return SimpleNamespace(
            settings=settings, token_ids=ids, left=left, right=right, links=lambda before: right.sum(0)
        )

    for found, expected in zip(*(chances(model(rank), 4, block, 0.7, 100) for rank in (0, 2)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    with pytest.raises(GenerationError, match="logits hold NaN"):
        chances(model(0), 4, Filled(block.logits * torch.nan, block.confidence), 1.0, None)


def test_whole_heads_are_the_target_s_own_and_rotary_embeddings_stay_wide(tmp_path: Path) -> None:
    """No second copy of the largest matrix; and frequencies in bfloat16 would be wrong after some tokens."""
    model = tiny_causal_lm(dtype=torch.bfloat16)
    draft = loaded(write_head(tmp_path, ZLAB, block_weights(ZLAB)), model)
    assert draft.dtype == torch.bfloat16
    assert draft.head.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert draft.model.rotary_emb.inv_freq.dtype == torch.float32


def below(**settings: Any) -> dict[str, Any]:
    return ZLAB | {"dflash_config": ZLAB["dflash_config"] | settings}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": (below(projector_type="dspark"), UnsupportedError, "a DFlash draft of the kind 'dspark'.*only EAGLE-3"),
    "version 2": (
        ZLAB | {"architectures": ["DFlash2DraftModel"]},
        UnsupportedError,
        "a draft of the kind DFlash2DraftModel",
    ),
    "chunks": (ZLAB | {"layer_types": ["chunked_attention", "full_attention"]}, UnsupportedError, "layers of chunked_"),
    "causal": (ZLAB | {"is_causal": True}, UnsupportedError, r"not read \(causal blocks\)"),
    "causal below": (below(causal=True), UnsupportedError, r"not read \(causal blocks\)"),
    "windows ahead": (ZLAB | WINDOWS | {"is_causal": False}, UnsupportedError, r"not read \(windows that see ahead\)"),
    "no width": (
        ZLAB | WINDOWS | {"use_sliding_window": False},
        ModelLoadError,
        "does not say how wide it is",
    ),
    "scaled logits": (below(final_logit_softcapping=20.0), UnsupportedError, r"not read \(final_logit_softcapping\)"),
    "anchor": (SPECULATORS | {"sample_from_anchor": True}, UnsupportedError, r"not read \(sample_from_anchor\)"),
    "layers": (ZLAB | {"model_type": "deepseek_v3"}, UnsupportedError, "layers of 'deepseek_v3'"),
    "no layers read": (below(target_layer_ids=None), ModelLoadError, "does not say which layers it reads"),
    "layers beyond": (
        below(target_layer_ids=[0, 3]),
        ModelLoadError,
        "layers 1, 4, and the target has the layers 1 to 3",
    ),
    "hidden size": (ZLAB | {"hidden_size": 64}, ModelLoadError, "target of hidden_size=64, and this one has 48"),
    "vocabulary": (ZLAB | {"vocab_size": 300}, ModelLoadError, "target of vocab_size=300, and this one has 259"),
    "block": (ZLAB | {"block_size": 40}, ModelLoadError, "blocks of 3 to 17 are read"),
    "mask": (below(mask_token_id=300), ModelLoadError, "the mask token 300"),
    "config": (
        ZLAB | {"num_hidden_layers": 3, "layer_types": None},
        ModelLoadError,
        r"do not fit its config: layers\.2",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_drafts_are_refused_by_name(what: str, tmp_path: Path) -> None:
    """Variants that are not read, another target's, and files that are torn; each says what to do."""
    config, error, says = REFUSED[what]
    folder = write_head(tmp_path, config, block_weights(ZLAB, COVERED if config.get("draft_vocab_size") else None))
    with pytest.raises(error, match=says):
        load_draft(folder, tiny_causal_lm(), byte_tokenizer())


def test_a_mask_that_is_no_row_of_its_own_embeddings_and_another_device_are_refused(tmp_path: Path) -> None:
    assert MASK < 259
    folder = write_head(tmp_path, ZLAB, block_weights(ZLAB) | {"embed_tokens.weight": torch.ones(100, 48)})
    with pytest.raises(ModelLoadError, match=r"embed_tokens.weight of the DFlash draft .* has the shape \(100, 48\)"):
        load_draft(folder, tiny_causal_lm(), byte_tokenizer())
    folder = write_head(tmp_path, ZLAB, block_weights(ZLAB))
    with pytest.raises(ConfigError, match="runs beside its target, on cpu: leave out draft_device"):
        load_draft(folder, tiny_causal_lm(), byte_tokenizer(), device="meta")
