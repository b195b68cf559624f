"""Encoder-decoder targets: trees in the decoder equal plain forwards, and requests do not see each other's prompts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hybrids import random_ids, random_tree
from helpers.saved_models import assert_one_clear_line, saved
from helpers.two_sided import FAMILIES, model_of, plain_logits, plain_rows, target_of
from transformers import GenerationConfig

from precedent.engine.loading import draft_for
from precedent.errors import ConfigError, UnsupportedError
from precedent.target import Slot, TargetModel
from precedent.target.kv.rows import Rows
from precedent.target.load.loading import load_draft
from precedent.target.model import target_of as opened
from precedent.target.prefix_pool import PrefixPool
from precedent.tree import ROOT
from precedent_models.encoder_decoder.target import EncoderDecoderTarget
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm, tiny_seq2seq_lm

EXACT = 1e-9
FLOAT32_INSIDE = {"t5gemma": 1e-5}
"""transformers computes this one's norms and softmax in float32 whatever the model's dtype is."""

QUICK = ("t5", "bart")
EVERY = [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]


def prefilled(target: TargetModel, prompt: list[int]) -> Slot:
    slot = target.new_slot()
    target.prefill(slot, prompt)
    return slot


@pytest.mark.parametrize("family", EVERY)
def test_every_path_of_ragged_trees_equals_a_plain_forward_step_after_step(family: str) -> None:
    """Three requests of other lengths share each forward; after every commit all nodes are compared (float64)."""
    untouched, target = model_of(family), target_of(family)
    prompts = [random_ids(1, 9), random_ids(2, 3), random_ids(3, 40)]
    slots = [prefilled(target, prompt) for prompt in prompts]
    for step in range(4):
        trees = [random_tree(10 * step + number, size) for number, size in enumerate((14, 5, 1))]
        scored = target.score(list(zip(slots, trees, strict=True)))
        for prompt, slot, tree, logits in zip(prompts, slots, trees, scored, strict=True):
            for leaf in set(range(len(tree))) - set(tree.parents):
                path, decoded = [ROOT, *tree.path_to(leaf)], [*slot.token_ids, slot.pending, *tree.tokens_to(leaf)]
                expected = plain_rows(untouched, prompt, decoded)[-len(path) :]
                near = FLOAT32_INSIDE.get(family, EXACT)
                torch.testing.assert_close(logits[[node + 1 for node in path]], expected, rtol=0, atol=near)
            target.commit(slot, tree, tree.path_to(random.Random(step).randrange(len(tree))), next_token=step + 1)


@pytest.mark.parametrize("family", QUICK)
def test_positions_by_row_are_noticed_at_load(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: siblings that take the next position."""
    monkeypatch.setattr(Rows, "positions", property(lambda rows: rows.kv.length + np.arange(len(rows))))
    with pytest.raises(UnsupportedError, match=r"\(a scored tree is"):
        EncoderDecoderTarget(model_of(family))


def test_the_users_model_still_answers_as_before() -> None:
    """Positions by depth and our attention are for our own forwards alone: training and `generate` go on."""
    for family in (*QUICK, "t5gemma"):
        model, untouched, near = model_of(family), model_of(family), FLOAT32_INSIDE.get(family, EXACT)
        EncoderDecoderTarget(model)
        prompt, decoded = random_ids(6, 12), random_ids(7, 9)
        torch.testing.assert_close(
            plain_logits(model, prompt, decoded), plain_logits(untouched, prompt, decoded), rtol=0, atol=near
        )
        ids = {name: torch.tensor([decoded]) for name in ("decoder_input_ids", "labels")}
        found, expected = (each(input_ids=torch.tensor([prompt]), **ids).loss for each in (model, untouched))
        torch.testing.assert_close(found, expected, rtol=0, atol=near)


def test_a_model_wrapped_twice_counts_positions_once() -> None:
    model = model_of("bart")
    EncoderDecoderTarget(model)
    target, prompt = EncoderDecoderTarget(model), random_ids(8, 7)
    row = target.plain_step(prefilled(target, prompt))[0]
    torch.testing.assert_close(row, plain_logits(model_of("bart"), prompt, target.answer_start), rtol=0, atol=EXACT)


def test_answers_begin_as_the_generation_config_says() -> None:
    """A forced first token stands before the answer; tokens that may never come have no probability."""
    model, untouched, prompt = model_of("marian"), model_of("marian"), random_ids(9, 8)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=256, forced_bos_token_id=17, bad_words_ids=[[5], [6, 7]], suppress_tokens=[9]
    )
    target = EncoderDecoderTarget(model)
    slot = prefilled(target, prompt)
    assert ([*slot.token_ids, slot.pending], target.answer_start) == ([256, 17], (256, 17))
    row, expected = target.plain_step(slot)[0], plain_logits(untouched, prompt, (256, 17)).clone()
    expected[[5, 9]] = -torch.inf
    torch.testing.assert_close(row, expected, rtol=0, atol=EXACT)


def test_a_generation_config_is_said_to_be_ignored_in_part_or_to_lack_a_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of("t5")
    model.generation_config = GenerationConfig(decoder_start_token_id=256, num_beams=4, no_repeat_ngram_size=3)
    EncoderDecoderTarget(model)
    assert "the generation config's num_beams, no_repeat_ngram_size is not applied" in caplog.text
    model.generation_config = GenerationConfig()
    with pytest.raises(UnsupportedError, match="decoder_start_token_id") as refused:
        EncoderDecoderTarget(model)
    assert_one_clear_line(refused.value)


def test_prompts_share_nothing() -> None:
    """The decoder's tokens of one prompt say nothing of another's: a pool gives new slots and keeps none."""
    target = target_of("t5")
    pool, prompt = PrefixPool(target), random_ids(12, 30)
    slot = pool.acquire("a", prompt)
    target.prefill(slot, prompt)
    assert pool.acquire("a", prompt) is not slot
    pool.release("a", slot)
    assert (pool.nbytes, pool.acquire("a", prompt).token_ids) == (0, [])


@pytest.mark.parametrize("option", ["bitwise", "cuda_graphs"])
def test_what_does_not_hold_is_refused_by_name(option: str) -> None:
    chosen: dict[str, Any] = {option: True}
    with pytest.raises(UnsupportedError, match=f"{option}=True does not work with the encoder-decoder model t5"):
        opened(model_of("t5"), **chosen)
    with pytest.raises((UnsupportedError, ConfigError), match=r"encoder-decoder|TargetModel was made without"):
        opened(target_of("t5"), **chosen)


@pytest.mark.parametrize("model_type", ["mvp", "bigbird_pegasus", "pegasus_x"])
@pytest.mark.slow
def test_families_whose_decoder_cannot_follow_a_tree_are_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{model_type} cannot be the target") as refused:
        EncoderDecoderTarget(tiny_seq2seq_lm(model_type))
    assert_one_clear_line(refused.value)


def test_a_draft_model_must_suit_its_target(tmp_path: Path) -> None:
    """A decoder-only draft continues prompt and answer as one text; the reverse pair makes no sense."""
    target, folder = target_of("t5"), saved(tmp_path, model_of("bart"))
    draft = load_draft(folder, target.model, byte_tokenizer())
    assert draft_for(target, draft)[0].encodes_prompt
    assert not draft_for(target, tiny_causal_lm())[0].encodes_prompt
    with pytest.raises(UnsupportedError, match="bart drafts only for a target of its kind"):
        draft_for(TargetModel(tiny_causal_lm()), draft)
    with pytest.raises(UnsupportedError, match="first layers of a T5ForConditionalGeneration"):
        load_draft("first-layers:1", target.model, byte_tokenizer())
