"""Published drafts are recognised by their files, here and on the hub, and what does not fit is refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.published_blocks import ZLAB, block_weights
from helpers.published_heads import (
    COVERED,
    FORMS,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS,
    random_weights,
    small_target,
    write_head,
)
from helpers.saved_models import assert_one_clear_line, saved
from safetensors.torch import save_file
from transformers import PreTrainedModel

from precedent.drafters import kind_of, load_draft
from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.load.loading import load_target
from precedent_drafts.eagle import EagleHead, EagleSettings, load_eagle
from precedent_drafts.kinds import EAGLE_HEADS
from precedent_drafts.published import (
    DFLASH,
    EAGLE,
    PublishedDraft,
    find_published,
    looks_published,
    published_draft,
)
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

UNNAMED = {name: value for name, value in SAFEAILAB.items() if name != "draft_vocab_size"}
"""A head whose config says nothing of it: its tensors tell."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_target()


def head_in(folder: Path, config: dict[str, Any], **weights: Any) -> Path:
    """A head whose tensors are changed: None takes one away."""
    whole = random_weights(config) | weights
    return write_head(folder, config, {name: tensor for name, tensor in whole.items() if tensor is not None})


@pytest.mark.parametrize(
    ("config", "weights", "kind"),
    [
        *((config, random_weights(config), EAGLE) for config in FORMS.values()),
        (UNNAMED, random_weights(SAFEAILAB), EAGLE),
        (ZLAB, block_weights(ZLAB), DFLASH),
    ],
    ids=[*FORMS, "unnamed", "DFlash"],
)
def test_folders_are_recognised(config: dict[str, Any], weights: Any, kind: str, tmp_path: Path) -> None:
    """By their configs, and by their tensors where these say nothing."""
    draft = published_draft(write_head(tmp_path, config, weights))
    assert draft is not None
    assert draft.kind == kind
    assert str(tmp_path) in str(draft)
    assert kind_of(tmp_path) is not None


def test_whole_models_are_not_taken_for_drafts(tmp_path: Path) -> None:
    """A Llama of one layer neither; nor a folder without a config."""
    one = saved(tmp_path / "one", tiny_causal_lm(num_hidden_layers=1))
    two = saved(tmp_path / "two", tiny_causal_lm())
    for folder in (one, two, tmp_path):
        assert published_draft(Path(folder)) is None
        assert kind_of(Path(folder)) is None
    draft = load_draft(one, tiny_causal_lm(), byte_tokenizer())
    assert not isinstance(draft, EagleHead)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"speculators_model_type": "peagle"}, "a draft of the kind 'peagle' of speculators: only EAGLE-3 heads"),
        (
            {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"},
            "a draft of the kind EagleLlamaForCausalLM",
        ),
        ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "a draft of the kind Qwen3DSparkModel"),
        ({"architectures": ["MedusaModel"]}, "a draft of the kind MedusaModel"),
    ],
    ids=["P-EAGLE", "EAGLE", "DSpark", "Medusa"],
)
def test_drafts_of_other_kinds_are_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = write_head(tmp_path, config, {"fc.weight": torch.ones(2, 2)})
    with pytest.raises(UnsupportedError, match=says) as caught:
        load_draft(folder, tiny_causal_lm(), byte_tokenizer())
    assert_one_clear_line(caught.value)


def test_earlier_versions_of_eagle_are_refused(tmp_path: Path) -> None:
    """Their config is that of a Llama of one layer as well; in SafeAILab's files, which torch writes."""
    layer = {"layers.0.self_attn.q_proj.weight": torch.ones(2, 2), "fc.weight": torch.ones(2, 4)}
    folder = write_head(tmp_path, UNNAMED, layer, older=True)
    with pytest.raises(UnsupportedError, match="an EAGLE head of the first or second version"):
        load_draft(folder, tiny_causal_lm(), byte_tokenizer())


def test_layers_are_counted_as_each_format_does(tmp_path: Path, model: PreTrainedModel) -> None:
    """In vLLM and speculators i is the output of layer i, in SGLang's eagle_config that of i + 1; the usual three."""

    def reads(config: dict[str, Any], form: str = "SpecForge") -> tuple[int, ...]:
        return EagleSettings.of(PublishedDraft(EAGLE, form, tmp_path, config), model.config).reads

    assert reads(SAFEAILAB) == (2, 3, 4)
    assert reads(SPECFORGE) == (1, 2, 3)
    assert reads(SPECFORGE | {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}) == (2, 5, 7)
    assert reads(SPECULATORS, "speculators") == (1, 2, 3)
    assert reads(SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [6, 2]}, "speculators") == (6, 2)
    thirty_two = tiny_causal_lm(num_hidden_layers=32, hidden_size=16).config
    assert EagleSettings.of(PublishedDraft(EAGLE, "SpecForge", tmp_path, SAFEAILAB), _sized(thirty_two)).reads == (
        2,
        16,
        29,
    )


def _sized(config: Any) -> Any:
    config.hidden_size = 48
    return config


def deeper(**settings: Any) -> dict[str, Any]:
    return SPECULATORS | {"transformer_layer_config": SPECULATORS["transformer_layer_config"] | settings}


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


EAGLE_CONFIG = SPECFORGE["eagle_config"]
WRONG_CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "hidden size": (SPECFORGE | {"hidden_size": 64}, ModelLoadError, "hidden_size=64, and this one has 48: give the"),
    "vocabulary": (
        deeper(vocab_size=300),
        ModelLoadError,
        "vocab_size=300, and this one has 259: give somebody/a-llama",
    ),
    "layers": (
        SPECFORGE | {"eagle_aux_hidden_state_layer_ids": [2, 9, 12]},
        ModelLoadError,
        "reads the outputs of layers 2, 9, 12, and the target has the layers 1 to 7",
    ),
    "embeddings": (SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, ModelLoadError, "layers 0, 1, 2"),
    "last state": (
        SPECFORGE | {"eagle_config": EAGLE_CONFIG | {"use_aux_hidden_state": False}},
        UnsupportedError,
        "reads the target's last hidden state alone",
    ),
    "two norms": (SPECFORGE | {"norm_before_fc": True, "fc_norm": True}, ModelLoadError, "a head has one of them"),
    "residual": (without(SPECULATORS, "norm_before_residual"), ModelLoadError, "does not say norm_before_residual"),
    "mixture": (
        SPECFORGE | {"model_type": "qwen3_moe"},
        UnsupportedError,
        "layers of 'qwen3_moe', and drafts of llama",
    ),
    "window": (
        deeper(model_type="qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0),
        UnsupportedError,
        "layers of sliding_attention, which is not read",
    ),
    "rope": (
        deeper(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        UnsupportedError,
        "dynamic rotary embeddings, which change with the length",
    ),
    "no config": (
        SPECFORGE | {"num_attention_heads": 5},
        ModelLoadError,
        "the config of the EAGLE-3 head .* cannot be read",
    ),
}


@pytest.mark.parametrize("what", WRONG_CONFIGS)
def test_configs_that_do_not_fit_are_refused(what: str, tmp_path: Path, model: PreTrainedModel) -> None:
    """Of another target, of a variant that is not read, or torn; the checks of loading and of `precedent doctor`."""
    config, error, says = WRONG_CONFIGS[what]
    folder = write_head(tmp_path, config, random_weights(SPECULATORS if "speculators_config" in config else SPECFORGE))
    with pytest.raises(error, match=says) as caught:
        load_draft(folder, model, byte_tokenizer())
    assert_one_clear_line(caught.value)
    with pytest.raises(error, match=says):
        EAGLE_HEADS.recognises(folder, model.config)


WIDE = torch.zeros(300, dtype=torch.bool)
WRONG_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "a missing part": ({"midlayer.mlp.up_proj.weight": None}, r"lacks model\.layers\.0\.mlp\.up_proj\.weight"),
    "one too many": ({"more.weight": torch.ones(2)}, r"has more than is read: more\.weight"),
    "another width": (
        {"fc.weight": torch.ones(48, 100)},
        r"fusion\.fc\.weight of .* \(48, 100\).* ask for \(48, 144\)",
    ),
    "a narrow head": ({"lm_head.weight": torch.ones(len(COVERED), 20)}, r"lm_head\.weight of .* ask for \(125, 48\)"),
    "other embeddings": (
        {"embed_tokens.weight": torch.ones(200, 48)},
        r"embed_tokens\.weight of .* ask for \(259, 48\)",
    ),
    "another vocabulary": ({"t2d": WIDE}, "a vocabulary of 300 tokens, and the target's has 259"),
    "tokens beyond": ({"d2t": torch.full((125,), 200), "t2d": None}, "tokens up to 324, and the target's vocabulary"),
    "a token twice": ({"d2t": -torch.arange(125), "t2d": None}, "gives one token to two rows"),
    "another mask": ({"d2t": torch.zeros(125, dtype=torch.long)}, "d2t and t2d name different tokens"),
    "a short map": ({"d2t": torch.zeros(100, dtype=torch.long)}, "d2t has 100 entries for a head of 125 rows"),
    "no map": ({"d2t": None, "t2d": None}, "a head of 125 tokens without a d2t"),
    "scales": ({"fc.weight_scale": torch.ones(1)}, r"is quantised \(fc\.weight_scale\)"),
}


@pytest.mark.parametrize("what", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused(what: str, tmp_path: Path, model: PreTrainedModel) -> None:
    changes, says = WRONG_TENSORS[what]
    with pytest.raises((ModelLoadError, UnsupportedError), match=says) as caught:
        load_draft(head_in(tmp_path, SPECFORGE, **changes), model, byte_tokenizer())
    assert_one_clear_line(caught.value)


def test_a_folder_without_weights_says_so(tmp_path: Path, model: PreTrainedModel) -> None:
    folder = write_head(tmp_path, SPECFORGE, random_weights(SPECFORGE))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights: get all of its files"):
        load_draft(folder, model, byte_tokenizer())
    (folder / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ModelLoadError, match="cannot load the draft model"):
        load_draft(folder, model, byte_tokenizer())


def test_sharded_files_are_read(tmp_path: Path, model: PreTrainedModel) -> None:
    """With an index, as large drafts are published."""
    whole = load_head(write_head(tmp_path / "whole", SPECFORGE, random_weights(SPECFORGE)), model)
    folder, weights = tmp_path / "sharded", random_weights(SPECFORGE)
    write_head(folder, SPECFORGE, {})
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": {"fc.weight"}, "b.safetensors": weights.keys() - {"fc.weight"}}
    for file, names in parts.items():
        save_file({name: weights[name].contiguous() for name in names}, folder / file)
    places = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(places).replace(chr(39), chr(34))}}}')
    again = load_head(folder, model)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in whole.state_dict().items())


def load_head(folder: Path, model: PreTrainedModel) -> EagleHead:
    draft = published_draft(folder)
    assert draft is not None
    return load_eagle(draft, model)


def test_embeddings_equal_to_the_target_s_are_shared_and_others_kept(
    tmp_path: Path, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Speculators writes them into every head; the log says what was read."""
    table = model.get_input_embeddings().weight.detach()  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO, "precedent_drafts.eagle"):
        same = load_head(head_in(tmp_path / "same", SPECULATORS, **{"embed_tokens.weight": table.clone()}), model)
    assert "covers 125 of 259 tokens; it was trained for somebody/a-llama" in caplog.text
    other = load_head(head_in(tmp_path / "other", SPECULATORS, **{"embed_tokens.weight": table + 1.0}), model)
    none = load_head(head_in(tmp_path / "none", SPECULATORS), model)
    ids = torch.tensor([[5]])
    pointers = [head.get_input_embeddings().weight.data_ptr() for head in (same, none)]  # type: ignore[union-attr]
    assert pointers == [table.data_ptr()] * 2
    embedded = [head.get_input_embeddings().embeddings(ids) for head in (same, other)]  # type: ignore[union-attr]
    torch.testing.assert_close(embedded[1], embedded[0] + 1.0)


def test_a_narrower_head_reads_a_wider_target(tmp_path: Path, model: PreTrainedModel) -> None:
    """target_hidden_size differs from hidden_size; then it needs embeddings of its own."""
    config = SPECFORGE | {"hidden_size": 36, "target_hidden_size": 48}
    head = load_head(head_in(tmp_path / "own", config, **{"embed_tokens.weight": torch.ones(259, 36)}), model)
    assert head.fusion.fc.weight.shape == (36, 144)
    with pytest.raises(ModelLoadError, match=r"has no embed_tokens\.weight.*48 numbers where it reads 36"):
        load_head(head_in(tmp_path / "none", config), model)


def test_a_head_without_rows_takes_the_target_s(tmp_path: Path, model: PreTrainedModel) -> None:
    """All of them, or those of the tokens that it covers."""
    theirs: Any = model.get_output_embeddings()
    whole = load_head(
        head_in(tmp_path / "whole", SPECFORGE, **{"lm_head.weight": None, "d2t": None, "t2d": None}), model
    )
    some = load_head(head_in(tmp_path / "some", SPECFORGE, **{"lm_head.weight": None}), model)
    assert whole.get_output_embeddings() is theirs
    rows: Any = some.get_output_embeddings()
    assert torch.equal(rows.rows.weight, theirs.weight[list(COVERED)])


@pytest.mark.parametrize("config", [SPECFORGE, SPECULATORS, ZLAB], ids=["EAGLE", "speculators", "DFlash"])
def test_a_draft_is_no_target(config: dict[str, Any], tmp_path: Path) -> None:
    """It says what it is and where it belongs."""
    folder = write_head(tmp_path, config, {"fc.weight": torch.ones(2, 2)})
    with pytest.raises(ModelLoadError, match=r"holds a draft that reads its target .* give it as the draft model"):
        load_target(folder)


def test_a_repository_of_the_hub_is_a_folder(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config tells what it is, then its weights are fetched; the id goes to the hub as it was given."""
    folder = write_head(tmp_path, SAFEAILAB, random_weights(SAFEAILAB), older=True)
    asked: list[tuple[str, tuple[str, ...]]] = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr("precedent_drafts.published.config_at", lambda source, **where: SAFEAILAB)
    monkeypatch.setattr("precedent_drafts.published.snapshot_download", fetch)
    draft = find_published("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
    assert draft is not None
    assert draft.folder == folder
    assert [name for name, _ in asked] == ["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"] * 2
    assert asked[1][1] == ("pytorch_model.bin",)
    assert load_eagle(draft, model).settings.reads == (2, 3, 4)
    del asked[:]
    find_published("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", weights=False)
    assert [patterns for _, patterns in asked] == [("config.json",)]
    monkeypatch.setattr("precedent_drafts.published.config_at", lambda source, **where: {"model_type": "llama"})
    assert find_published("somebody/a-llama") is None


def test_a_target_on_several_devices_is_refused(tmp_path: Path) -> None:
    """The head would have to follow it."""
    heads = (
        (SPECFORGE, random_weights(SPECFORGE), "eagle needs the whole target on one device"),
        (ZLAB, block_weights(ZLAB), "block-draft needs the whole target on one device"),
    )
    spread = small_target()
    spread.base_model.layers[6].to("meta")  # type: ignore[union-attr]
    for place, (config, weights, says) in enumerate(heads):
        with pytest.raises(UnsupportedError, match=says):
            load_draft(write_head(tmp_path / str(place), config, weights), spread, byte_tokenizer())


def test_nothing_else_looks_like_a_draft() -> None:
    assert not looks_published(tiny_causal_lm().config.to_dict())
    assert not looks_published({"architectures": ["Eagle2_5_VLForConditionalGeneration"]})
    assert not looks_published({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32})
