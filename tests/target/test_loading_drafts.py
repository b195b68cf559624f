"""Loading draft models beside their target: other folders, objects, and the target's own first layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.saved_models import PROMPT, assert_one_clear_line, logits_of, saved

from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.target import TargetModel
from precedent.target.load.loading import load_draft
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()


def test_a_draft_model_gets_the_dtype_of_its_target_and_an_object_stays_what_it_is(tmp_path: Path) -> None:
    target, draft = tiny_causal_lm(), tiny_causal_lm(seed=1, dtype=torch.float32)
    assert load_draft(saved(tmp_path, draft), target, TOKENIZER).dtype == target.dtype == torch.float64
    assert load_draft(draft, target, TOKENIZER) is draft


def test_a_draft_model_with_another_tokenizer_names_the_first_difference(tmp_path: Path) -> None:
    other = saved(tmp_path / "draft", tiny_causal_lm(vocab_size=260), byte_tokenizer(merges=(("e", "r"),)))
    with pytest.raises(ModelLoadError, match=r"token 256 is 'er' there and '<\|endoftext\|>' in the target") as caught:
        load_draft(other, tiny_causal_lm(), TOKENIZER)
    assert_one_clear_line(caught.value)


@pytest.mark.parametrize("width", [259, 264, 300])
def test_a_draft_model_padded_to_another_width_fits_its_target(tmp_path: Path, width: int) -> None:
    """Families of models share a tokenizer and pad the vocabulary differently; padding ids get probability 0."""
    target = tiny_causal_lm(vocab_size=264)
    draft = load_draft(saved(tmp_path, tiny_causal_lm(vocab_size=width, seed=1)), target, TOKENIZER)
    probs, plain = logits_of(draft).softmax(-1), logits_of(tiny_causal_lm(vocab_size=width, seed=1))[..., :264]
    assert probs.shape[-1] == TargetModel(draft).vocab_size == 264
    torch.testing.assert_close(probs[..., : plain.shape[-1]], plain.softmax(-1))
    assert not probs[..., width:].any()


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("count", [1, 2])
def test_first_layers_compute_what_the_target_computes_up_to_there(model_type: str, count: int) -> None:
    """They share its weights, and leave it as it was."""
    target = tiny_causal_lm(model_type)
    before = logits_of(target)
    draft = load_draft(f"first-layers:{count}", target, TOKENIZER)
    with torch.inference_mode():
        hidden = target.model(PROMPT, output_hidden_states=True).hidden_states[count]
        expected = target.lm_head(target.model.norm(hidden))
    assert draft.config.num_hidden_layers == count
    torch.testing.assert_close(logits_of(draft), expected)
    owned = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in draft.parameters()} < owned
    assert target.config.num_hidden_layers == len(target.model.layers) == 3
    assert torch.equal(logits_of(target), before)


@pytest.mark.parametrize("spec", [f"first-layers:{count}" for count in ("0", "3", "-1", "", "x")])
def test_a_wrong_number_of_first_layers_names_the_range(spec: str) -> None:
    with pytest.raises(ConfigError, match="from 1 to 2"):
        load_draft(spec, tiny_causal_lm(), TOKENIZER)


def test_first_layers_of_an_unknown_shape_of_model_are_refused() -> None:
    gpt2 = tiny_causal_lm("gpt2", n_layer=2, n_embd=32, n_head=2)
    with pytest.raises(UnsupportedError, match="first layers of a GPT2LMHeadModel"):
        load_draft("first-layers:1", gpt2, TOKENIZER)
