"""A trained draft on disk: what its folder holds, whose it is, and the distribution of its restricted head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.tiny_draft import PROMPTS, tiny_target, train_tiny
from safetensors.torch import load_file, save_file

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters import load_draft
from precedent.drafters.base import Drafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.engine.engine import Engine
from precedent.errors import ModelLoadError
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent.tree import ROOT, TreeBuilder
from precedent_drafts.borrowed import HEAD_TOKENS
from precedent_drafts.trained import draft_beside, initial_weights
from precedent_testing.draft_distribution import check_draft_distribution
from precedent_testing.drafter_contract import DrafterContract
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained draft."""
    out = tmp_path_factory.mktemp("drafts") / "draft"
    train_tiny(out)
    return out


def test_a_folder_holds_layers_and_no_pickle(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["draft.json", "draft.safetensors"]
    names = set(load_file(folder / "draft.safetensors"))
    layer = {f"layers.0.{name}" for name in tiny_target().model.layers[0].state_dict()}
    assert names == layer | {HEAD_TOKENS}


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


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.8), SamplingParams(temperature=1.3, top_p=0.9)])
def test_a_restricted_draft_reports_the_distribution_that_it_samples_from(sampling: SamplingParams) -> None:
    _, draft = restricted()
    session = DraftModelDrafter(draft).begin(Request("r", (3, 1, 4), sampling, mode="traversal"))

    def drawing(builder: TreeBuilder, rng: object) -> None:
        builder.add_fixed(ROOT, 4, "recall")
        session.draw(builder, 2, rng)

    check_draft_distribution(drawing)


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


def test_a_draft_is_no_target(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="give it as the draft model beside the target that it was"):
        load_target(folder)
