"""A trained draft on disk: what its folder holds, whose it is, and the distribution of its restricted head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from helpers.conditioned import opinionated_weights, random_conditioned
from helpers.tiny_draft import PROMPTS, tiny_target, train_tiny
from safetensors.torch import load_file, save_file

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.drafters.base import Drafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.engine.engine import Engine
from precedent.errors import ModelLoadError
from precedent.target import TargetModel
from precedent_drafts.heads import HEAD_TOKENS
from precedent_drafts.trained import TOKEN_GUIDED, conditioned_beside, draft_beside, fusion_of, initial_weights
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained draft."""
    out = tmp_path_factory.mktemp("drafts") / "draft"
    train_tiny(out)
    return out


def test_a_trained_draft_drafts_for_its_target(folder: Path) -> None:
    """Greedy text is plain decoding's, with drafts from the folder, half of the vocabulary out of its reach."""
    target, texts = tiny_target(), []
    for draft in (None, folder):
        engine = Engine.load(target, tokenizer=TOKENIZER, draft_model=draft)
        speculation = SpeculationConfig(drafters=("draft-model",))
        result = engine.submit(PROMPTS[0], SamplingParams(max_tokens=20), speculation=speculation).result()
        texts.append(result.token_ids)
        engine.close()
    assert texts[0] == texts[1]
    assert result.stats.num_draft_tokens > 0


def test_nothing_but_the_layers_is_the_drafts_own(folder: Path) -> None:
    target = tiny_target()
    draft = load_draft(folder, target, TOKENIZER)
    own = {name for name, weight in draft.named_parameters() if weight.data_ptr() not in
           {parameter.data_ptr() for parameter in target.parameters()}}  # fmt: skip
    assert own == {"lm_head.rows.weight"} | {f"model.{name}" for name in load_file(folder / "draft.safetensors")} - {
        f"model.{HEAD_TOKENS}"
    }


# The restricted head


def restricted(vocab_size: int = 16, kept: int = 6) -> tuple[TargetModel, TargetModel]:
    target = tiny_causal_lm(vocab_size=vocab_size, hidden_size=16, num_hidden_layers=2, seed=31)
    weights = {**initial_weights(target, (0,)), HEAD_TOKENS: torch.arange(kept) * 2}
    return TargetModel(target), TargetModel(draft_beside(target, (0,), weights))


class TestRestrictedHead(DrafterContract):
    """A draft that knows some tokens alone keeps the contract of every drafter."""

    def make_drafter(self) -> Drafter:
        """Six of sixteen tokens."""
        return DraftModelDrafter(restricted()[1])


def test_the_restricted_distribution_is_the_full_one_on_the_tokens_that_are_known() -> None:
    target, draft = restricted()
    full = draft_beside(target.model, (0,), initial_weights(target.model, (0,)))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        found, expected = (model(tokens).logits for model in (draft.model, full))
    known = torch.arange(6) * 2
    torch.testing.assert_close(found[..., known], expected[..., known])
    assert torch.isneginf(found[..., 1::2]).all()
    assert torch.isneginf(found[..., 12:]).all()


# Refusals


def damaged(folder: Path) -> None:
    (folder / "draft.safetensors").write_bytes((folder / "draft.safetensors").read_bytes()[:-100])


def of_a_later_format(folder: Path) -> None:
    settings = json.loads((folder / "draft.json").read_text())
    (folder / "draft.json").write_text(json.dumps(settings | {"format": 9}))


def without_settings(folder: Path) -> None:
    (folder / "draft.json").write_text("{")


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "draft.safetensors")
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "draft.safetensors")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damaged, "cannot load the draft model"),
        (of_a_later_format, "format 9, this version reads 1"),
        (without_settings, "cannot be read"),
        (without_a_weight, "mlp.up_proj.weight"),
    ],
)
def test_a_damaged_draft_is_one_clear_line(
    damage: Callable[[Path], None], says: str, folder: Path, tmp_path: Path
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    with pytest.raises(ModelLoadError, match=says) as caught:
        load_draft(tmp_path, tiny_target(), TOKENIZER)
    assert "\n" not in str(caught.value)


def test_a_draft_of_another_target_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"trained for LlamaForCausalLM and uses its embeddings"):
        load_draft(folder, tiny_target(seed=1), TOKENIZER)


def test_a_target_of_the_same_embeddings_may_use_it_and_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    load_draft(folder, target, TOKENIZER)
    assert caplog.messages == []
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight.add_(0.5)
    load_draft(folder, target, TOKENIZER)
    assert ["fewer of its tokens will be accepted" in message for message in caplog.messages] == [True]


def test_precision_does_not_tell_targets_apart(folder: Path) -> None:
    assert load_draft(folder, tiny_target().to(torch.bfloat16), TOKENIZER).dtype == torch.bfloat16


# Drafts that read hidden states


def test_engines_that_share_a_draft_do_not_mix_their_states() -> None:
    """What one thread hands in, another does not read."""
    model = tiny_causal_lm("llama", vocab_size=16, hidden_size=16)
    weights = opinionated_weights(model, 2, TOKEN_GUIDED, range(16))
    inputs: Any = random_conditioned(model, (2,), TOKEN_GUIDED, weights).get_input_embeddings()
    tokens, states = torch.tensor([[3, 4]]), torch.ones(2, 16, dtype=torch.float64)
    with torch.no_grad():
        bare = inputs(tokens)
        other = Thread(target=lambda: inputs.give([5 * states]))
        other.start()
        other.join()
        assert torch.equal(inputs(tokens), bare)
        inputs.give([states])
        assert not torch.equal(inputs(tokens), bare)
        inputs.give([])
        assert torch.equal(inputs(tokens), bare)


def test_weights_that_do_not_fit_are_refused() -> None:
    """Missing ones, and a fusion of a later version."""
    model = tiny_causal_lm()
    with pytest.raises(ModelLoadError, match=r"the weights fusion\.\* of the draft model do not fit"):
        conditioned_beside(model, (0,), TOKEN_GUIDED, initial_weights(model, (0,)))
    with pytest.raises(ModelLoadError, match="does not know: 'loud'"):
        fusion_of("loud", 8)
