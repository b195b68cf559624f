"""Our heads compute what the library `speculators` computes, from folders that it wrote itself.

Tiny random drafts in float32. The library's own forward runs several steps of its training, which are those of
drafting: each reads the one before. `make test-speculators` runs this in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import published_heads
from helpers.hybrids import prefilled, random_ids
from helpers.published_heads import COVERED, write_head
from torch import Tensor
from transformers import PreTrainedModel

from precedent.drafters import load_draft
from precedent.target import TargetModel
from precedent.tree import EMPTY_TREE
from precedent_drafts.block_draft import BlockDraft
from precedent_drafts.block_drafter import BlockDrafter, BlockModel
from precedent_drafts.eagle import EagleHead, eagle_beside
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

pytestmark = [
    pytest.mark.speculators,
    pytest.mark.filterwarnings("default"),  # the library's own
]

TOLERANCE, STEPS, TEXT = 1e-4, 4, 30

READS = (1, 3, 5)

EAGLES: dict[str, dict[str, Any]] = {
    "Llama's layer": {"model_type": "llama", "norm_before_residual": True},
    "Llama's, states not normed first": {"model_type": "llama"},
    "two of Qwen3's": {"model_type": "qwen3", "num_hidden_layers": 2, "norm_before_residual": True},
    "the whole vocabulary": {"model_type": "llama", "whole": True},
    "one norm before fc": {"model_type": "llama", "norm_before_fc": True},
    "EAGLE-3.1": {"model_type": "llama", "fc_norm": True, "norm_output": True},
    "Llama 3's rotary embeddings": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}  # fmt: skip
"""Settings of heads as the library makes them."""

OF_SPECULATOR = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculators") / "target"
    tiny_causal_lm(num_hidden_layers=7, scale=1.5, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    """The target as transformers runs it."""
    return tiny_causal_lm(num_hidden_layers=7, scale=1.5, dtype=torch.float32)


def layers_config(model_type: str, **settings: Any) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    shape = {
        "vocab_size": 259, "hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }  # fmt: skip
    made = {"llama": LlamaConfig, "qwen3": Qwen3Config}[model_type](**{**shape, **settings})
    made._attn_implementation = "eager"
    return made


def about(algorithm: str, target: Path) -> Any:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    methods = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    verifier = VerifierConfig.from_pretrained(str(target))
    return SpeculatorsConfig(
        algorithm=algorithm, proposal_methods=methods, default_proposal_method="greedy", verifier=verifier
    )


def vocabulary(whole: bool) -> tuple[Tensor | None, Tensor | None]:
    if whole:
        return None, None
    marked = torch.zeros(259, dtype=torch.bool)
    marked[list(COVERED)] = True
    return marked, torch.tensor(COVERED) - torch.arange(len(COVERED))


def opinionated(draft: Any, seed: int = 1) -> Any:
    """Random weights of a size that tells rows apart; norms around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "verifier" in name or "embed_tokens" in name:
                continue
            size = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
            weight.copy_(torch.randn(weight.shape, generator=generator) * size + (weight.dim() == 1))
    return draft.eval()


def eagle_of_the_library(target: Path, model_type: str, **settings: Any) -> Any:
    from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig

    whole = settings.pop("whole", False)
    own = {name: settings.pop(name) for name in OF_SPECULATOR if name in settings}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers_config(model_type, **settings),
        draft_vocab_size=259 if whole else len(COVERED), eagle_aux_hidden_state_layer_ids=list(READS),
        speculators_config=about("eagle3", target), **own,
    )  # fmt: skip
    draft = Eagle3DraftModel(config)
    draft.load_vocab_mappings(*vocabulary(whole))
    draft.load_verifier_weights()
    return opinionated(draft)


@torch.inference_mode()
def states(plain: PreTrainedModel, ids: Sequence[int], reads: Sequence[int]) -> Tensor:
    output = plain(input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[number] for number in reads], -1)


@torch.inference_mode()
def steps_of_the_library(draft: Any, plain: PreTrainedModel, ids: Sequence[int]) -> list[Tensor]:
    """Logits of each step at each position: step k at position i is behind token i + 1 + k."""
    seen: list[Tensor] = []
    handle = draft.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    after = torch.tensor([list(ids[1:])])
    read = states(plain, ids, draft.config.eagle_aux_hidden_state_layer_ids)[:, :-1]
    draft(hidden_states=read, input_ids=after, document_ids=torch.zeros_like(after), ttt_steps=STEPS)
    handle.remove()
    return seen


def steps_of_ours(head: EagleHead, model: PreTrainedModel, ids: Sequence[int], places: Sequence[int]) -> list[Tensor]:
    """The same, where drafts follow the text, behind a prompt that ends with token i + 1."""
    target = TargetModel(model)
    drafting = eagle_beside(head, target)
    found: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for place in places:
        committed = prefilled(target, list(ids[: place + 2]))
        slot = drafting.new_slot()
        drafting.bind(slot, lambda committed=committed: committed)  # type: ignore[misc]
        drafting.prefill(slot, list(ids[1 : place + 2]))
        for step in range(STEPS):
            found[step].append(drafting.plain_step(slot)[0])
            drafting.commit(slot, EMPTY_TREE, [], ids[place + 2 + step])
    return [torch.stack(rows) for rows in found]


def compared(folder: Path, draft: Any, plain: PreTrainedModel) -> None:
    """Raise AssertionError unless ours, from a folder, says what the library's draft says, step by step."""
    ids, places = random_ids(5, TEXT), (0, 4, 17, TEXT - STEPS - 2)
    expected = steps_of_the_library(draft, plain, ids)
    model = tiny_causal_lm(num_hidden_layers=7, scale=1.5, dtype=torch.float32)
    head = load_draft(folder, model, byte_tokenizer())
    assert isinstance(head, EagleHead)
    covered = torch.arange(expected[0].shape[-1])
    covered = covered if getattr(draft, "d2t", None) is None else covered + draft.d2t
    for step, rows in enumerate(steps_of_ours(head, model, ids, places)):
        kept = rows[:, covered]
        torch.testing.assert_close(kept, expected[step][list(places)], rtol=0, atol=TOLERANCE)
        assert rows.isfinite().sum() == kept.numel(), "the tokens that a head does not cover have none"


@pytest.mark.parametrize("variant", EAGLES)
def test_eagle_heads_that_the_library_wrote(
    variant: str, target_folder: Path, plain: PreTrainedModel, tmp_path: Path
) -> None:
    """Over four steps, each behind the output of the one before, at several places of a text."""
    draft = eagle_of_the_library(target_folder, **EAGLES[variant])
    draft.save_pretrained(tmp_path / "head")
    compared(tmp_path / "head", draft, plain)


def eagerly(draft: Any) -> Any:
    """A draft that the library loaded, with attention that runs on every CPU."""
    from speculators.models.attention import create_float_mask

    draft._attn_impl, draft._create_mask_fn = "eager", create_float_mask
    return draft.float().eval()


def test_heads_of_specforge_are_what_the_library_converts_them_to(
    target_folder: Path, plain: PreTrainedModel, tmp_path: Path
) -> None:
    """The published names of tensors, converted by the library's own converter: the same logits both ways."""
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter
    from speculators.models.eagle3 import Eagle3DraftModel

    ids = [number - 1 for number in READS]
    config = published_heads.SPECFORGE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    weights = {
        name: weight.float() if weight.is_floating_point() else weight
        for name, weight in published_heads.random_weights(config).items()
    }
    folder = write_head(tmp_path / "specforge", config | {"torch_dtype": "float32"}, weights)
    converted = tmp_path / "converted"
    Eagle3Converter().convert(
        folder, converted, str(target_folder), validate=False, eagle_aux_hidden_state_layer_ids=list(READS)
    )
    draft = Eagle3DraftModel.from_pretrained(str(converted))
    draft.config.transformer_layer_config._attn_implementation = "eager"
    for place in (folder, converted):
        compared(place, eagerly(draft), plain)


def dflash_of_the_library(target: Path, *, whole: bool = False, **layers: Any) -> Any:
    from speculators import DFlashDraftModel, DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers_config("qwen3", num_hidden_layers=2, **layers), block_size=6, mask_token_id=258,
        draft_vocab_size=259 if whole else len(COVERED), aux_hidden_state_layer_ids=list(READS),
        speculators_config=about("dflash", target),
    )  # fmt: skip
    draft = DFlashDraftModel(config)
    draft.load_vocab_mappings(*vocabulary(whole))
    draft.load_verifier_weights()
    head = draft.lm_head.weight.detach().clone()
    draft = opinionated(draft)
    if whole:  # the library takes the target's own when it loads the draft
        draft.lm_head.weight.data.copy_(head)
    return draft


@torch.inference_mode()
def blocks_of_the_library(draft: Any, plain: PreTrainedModel, ids: Sequence[int], anchors: Sequence[int]) -> Tensor:
    """Logits of the positions behind each anchor, `[anchors, block_size - 1, draft_vocab_size]`."""
    mask = torch.zeros(1, len(ids), dtype=torch.bool)
    mask[0, list(anchors)] = True
    tokens = torch.tensor([list(ids)])
    read = states(plain, ids, draft.config.aux_hidden_state_layer_ids)
    _, logits, *_ = draft._backbone_forward(
        read, tokens, mask, read[..., :48], torch.zeros_like(tokens), max_anchors=len(anchors)
    )
    return logits[0].view(len(anchors), draft.block_size, -1)[:, 1:]


def blocks_of_ours(folder: Path, ids: Sequence[int], anchors: Sequence[int]) -> tuple[Tensor, BlockModel]:
    model = tiny_causal_lm(num_hidden_layers=7, scale=1.5, dtype=torch.float32)
    target = TargetModel(model)
    draft = load_draft(folder, model, byte_tokenizer())
    assert isinstance(draft, BlockDraft)
    drafting = BlockModel(draft, target)
    slots = [prefilled(target, list(ids[: anchor + 1])) for anchor in anchors]
    places = [drafting.place_beside(lambda slot=slot: slot, len(slot.token_ids) + 1) for slot in slots]  # type: ignore[misc]
    filled = drafting.fill([(place, slot.pending) for place, slot in zip(places, slots, strict=True)])
    assert BlockDrafter(drafting).name == "block-draft"
    return torch.stack([block.logits for block in filled]), drafting


DFLASHES: dict[str, dict[str, Any]] = {
    "some tokens": {},
    "the whole vocabulary": {"whole": True},
    "a window": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": TEXT + 8, "use_sliding_window": True,
    },
}  # fmt: skip
"""Settings of drafts as the library makes them; its training counts a window from the block's first token."""


@pytest.mark.parametrize("variant", DFLASHES)
def test_dflash_drafts_that_the_library_wrote(
    variant: str, target_folder: Path, plain: PreTrainedModel, tmp_path: Path
) -> None:
    """Blocks behind several places of a text, in one forward."""
    ids, anchors, whole = random_ids(6, TEXT), (1, 5, 19), "whole" in DFLASHES[variant]
    draft = dflash_of_the_library(target_folder, **DFLASHES[variant])
    draft.save_pretrained(tmp_path / "draft")
    expected = blocks_of_the_library(draft, plain, ids, anchors)
    found, drafting = blocks_of_ours(tmp_path / "draft", ids, anchors)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert drafting.token_ids.tolist() == list(range(259) if whole else COVERED)


def test_drafts_of_z_lab_are_what_the_library_converts_them_to(
    target_folder: Path, plain: PreTrainedModel, tmp_path: Path
) -> None:
    """The published names of tensors and the published counting of layers, by the library's own converter."""
    from speculators import DFlashDraftModel
    from speculators.convert.dflash.converter import DFlashConverter

    below = {"mask_token_id": 258, "target_layer_ids": [number - 1 for number in READS]}
    config = published_heads.ZLAB | {"dflash_config": below, "num_target_layers": 7}
    weights = {name: weight.float() for name, weight in published_heads.block_weights(config).items()}
    weights["fc.weight"] = torch.randn(48, 3 * 48, generator=torch.Generator().manual_seed(2)) * 0.1
    folder, converted = write_head(tmp_path / "zlab", config, weights), tmp_path / "converted"
    DFlashConverter().convert(folder, converted, str(target_folder), validate=False)
    draft = eagerly(DFlashDraftModel.from_pretrained(str(converted)))
    draft.config.transformer_layer_config._attn_implementation = "eager"
    ids, anchors = random_ids(6, TEXT), (1, 5, 19)
    expected = blocks_of_the_library(draft, plain, ids, anchors)
    for place in (folder, converted):
        found, _ = blocks_of_ours(place, ids, anchors)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
