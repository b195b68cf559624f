"""Published drafts are recognised by their files, here and on the hub, and what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.published_heads import (
    COVERED,
    DFLASH,
    FORMS,
    SAFEAILAB,
    SPECFORGE,
    SPECULATORS,
    ZLAB,
    block_weights,
    random_weights,
    small_target,
    with_layers,
    write_head,
)
from helpers.saved_models import assert_one_clear_line, saved
from transformers import PreTrainedModel

from precedent.drafters import kind_of, load_draft
from precedent.errors import ModelLoadError, UnsupportedError
from precedent_drafts.eagle import EagleHead, EagleSettings, load_eagle
from precedent_drafts.kinds import BLOCKS, EAGLE_HEADS
from precedent_drafts.published import EAGLE, PublishedDraft, find_published, looks_published, published_draft
from precedent_drafts.trained import DraftSettings
from precedent_testing.sweep import tiny_model
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
        (ZLAB, block_weights(ZLAB), "DFlash draft"),
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
    assert not looks_published({"architectures": ["Eagle2_5_VLForConditionalGeneration"]})


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
    return with_layers(SPECULATORS, settings)


def below(**settings: Any) -> dict[str, Any]:
    return ZLAB | {"dflash_config": ZLAB["dflash_config"] | settings}


EAGLE_CONFIG, LAYER_IDS = SPECFORGE["eagle_config"], "eagle_aux_hidden_state_layer_ids"
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "use_sliding_window": True}
UNSAID = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
OLDER = {"layers.0.self_attn.q_proj.weight": torch.ones(2, 2), "fc.weight": torch.ones(2, 4)}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED: list[tuple[dict[str, Any], str]] = [
    # other kinds
    ({"speculators_model_type": "peagle"}, "a draft of the kind 'peagle' of speculators: only EAGLE-3 heads"),
    ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "a draft of the kind EagleLlamaForCausalLM"),
    ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, "a draft of the kind Qwen3DSparkModel"),
    ({"architectures": ["MedusaModel"]}, "a draft of the kind MedusaModel"),
    (UNNAMED, "an EAGLE head of the first or second version"),
    (below(projector_type="dspark"), "a DFlash draft of the kind 'dspark'.*only EAGLE-3"),
    (ZLAB | {"architectures": ["DFlash2DraftModel"]}, "a draft of the kind DFlash2DraftModel"),
    # EAGLE heads of another target, of a variant that is not read, or torn
    (SPECFORGE | {"hidden_size": 64}, "hidden_size=64, and this one has 48: give the"),
    (deeper(vocab_size=300), "vocab_size=300, and this one has 259: give somebody/a-llama"),
    (SPECFORGE | {LAYER_IDS: [2, 9, 12]}, "outputs of layers 2, 9, 12, and the target has the layers 1 to 7"),
    (SPECULATORS | {LAYER_IDS: [0, 1, 2]}, "layers 0, 1, 2"),
    (SPECFORGE | {"eagle_config": EAGLE_CONFIG | {"use_aux_hidden_state": False}}, "last hidden state alone"),
    (SPECFORGE | {"norm_before_fc": True, "fc_norm": True}, "a head has one of them"),
    (UNSAID, "does not say norm_before_residual"),
    (SPECFORGE | {"model_type": "qwen3_moe"}, "layers of 'qwen3_moe', and drafts of llama"),
    (
        deeper(model_type="qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0),
        "layers of sliding_attention, which is not read",
    ),
    (deeper(rope_parameters=ROPE), "dynamic rotary embeddings, which change with the length"),
    (SPECFORGE | {"num_attention_heads": 5}, "the config of the EAGLE-3 head .* cannot be read"),
    # DFlash drafts, likewise
    (ZLAB | {"layer_types": ["chunked_attention", "full_attention"]}, "layers of chunked_"),
    (ZLAB | {"is_causal": True}, r"not read \(causal blocks\)"),
    (below(causal=True), r"not read \(causal blocks\)"),
    (ZLAB | WINDOWS | {"is_causal": False}, r"not read \(windows that see ahead\)"),
    (ZLAB | WINDOWS | {"use_sliding_window": False}, "does not say how wide it is"),
    (below(final_logit_softcapping=20.0), r"not read \(final_logit_softcapping\)"),
    (DFLASH | {"sample_from_anchor": True}, r"not read \(sample_from_anchor\)"),
    (ZLAB | {"model_type": "deepseek_v3"}, "layers of 'deepseek_v3'"),
    (below(target_layer_ids=None), "does not say which layers it reads"),
    (below(target_layer_ids=[0, 7]), "layers 1, 8, and the target has the layers 1 to 7"),
    (ZLAB | {"hidden_size": 64}, "target of hidden_size=64, and this one has 48"),
    (ZLAB | {"vocab_size": 300}, "target of vocab_size=300, and this one has 259"),
    (ZLAB | {"block_size": 40}, "blocks of 3 to 17 are read"),
    (below(mask_token_id=300), "the mask token 300"),
    (ZLAB | {"num_hidden_layers": 3, "layer_types": None}, r"do not fit its config: layers\.2"),
]


@pytest.mark.parametrize(("config", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_drafts_that_are_not_read_or_do_not_fit_are_refused(
    config: dict[str, Any], says: str, tmp_path: Path, model: PreTrainedModel
) -> None:
    """In one line; `precedent doctor` says the same of what a config tells."""
    if config is UNNAMED:  # its config is that of a Llama of one layer; in SafeAILab's files, which torch writes
        folder = write_head(tmp_path, config, OLDER, older=True)
    elif "dflash_config" in config or config.get("speculators_model_type") == "dflash":
        folder = write_head(tmp_path, config, block_weights(ZLAB, COVERED if "draft_vocab_size" in config else None))
    else:
        written = random_weights(SPECULATORS if "speculators_config" in config else SPECFORGE)
        folder = write_head(tmp_path, config, written)
    with pytest.raises((ModelLoadError, UnsupportedError), match=says) as caught:
        load_draft(folder, model, byte_tokenizer())
    assert_one_clear_line(caught.value)
    if not re.search("mask|do not fit", says):
        with pytest.raises((ModelLoadError, UnsupportedError), match=says):
            [kind.recognises(folder, model.config) for kind in (EAGLE_HEADS, BLOCKS)]


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


# What `precedent doctor` says of them


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model on disk."""
    return saved(tmp_path_factory.mktemp("target"), small_target(dtype=torch.float32))


def finding(target: Path, draft: Path, tmp_path: Path) -> tuple[int, str, str]:
    """What `precedent doctor` says of a draft model: its status, and the state and text of the finding."""
    report = tmp_path / "report.json"
    status = precedent("doctor", target, "--draft-model", draft, "--json", report)
    found = {one["check"]: one for one in json.loads(report.read_text())["findings"]}["draft model"]
    return status, found["state"], found["finding"]


def test_doctor_says_what_was_recognised(target: Path, tmp_path: Path) -> None:
    """Format, layers and the model that a draft was trained for; without its weights, which may be large."""
    head = write_head(tmp_path / "head", SPECULATORS, random_weights(SPECULATORS))
    block = write_head(tmp_path / "block", DFLASH, block_weights(DFLASH, COVERED))
    assert finding(target, head, tmp_path) == (
        0,
        "note",
        f"the EAGLE-3 head {head} (in the format of speculators); it reads layers 1, 2, 3 of the target; trained for "
        "somebody/a-llama",
    )
    status, state, says = finding(target, block, tmp_path)
    assert (status, state) == (0, "note")
    assert "(in the format of speculators); it fills 4 positions from layers 1, 3 of the target" in says
    nameless = write_head(tmp_path / "nameless", SPECFORGE, {})
    assert finding(target, nameless, tmp_path)[2].endswith("trained for a target that it does not name")


def test_doctor_refuses_what_does_not_fit(target: Path, tmp_path: Path) -> None:
    """Another target's head, and a head in the place of a model."""
    other = write_head(tmp_path / "other", SPECFORGE | {"hidden_size": 64}, {})
    status, state, says = finding(target, other, tmp_path)
    assert (status, state) == (1, "no")
    assert "was trained for a target of hidden_size=64, and this one has 48" in says
    assert precedent("doctor", other) == 1


def test_a_draft_trained_for_a_target_is_not_refused_unseen(target: Path, tmp_path: Path) -> None:
    """Only loading it shows whether it fits."""
    draft = tmp_path / "draft"
    draft.mkdir()
    settings = DraftSettings("my-model", "embeddings", "layers", (0, 2))
    (draft / "draft.json").write_text(json.dumps(dataclasses.asdict(settings)))
    status, state, says = finding(target, draft, tmp_path)
    assert (status, state) == (0, "note")
    assert says.startswith("a chain, trained for my-model")


def test_doctor_names_heads_that_a_checkpoint_may_carry(tmp_path: Path) -> None:
    """By the model's type: transformers drops their weights."""
    saved(tmp_path / "model", tiny_model("qwen3_next"))
    precedent("doctor", tmp_path / "model", "--json", tmp_path / "report.json")
    found = {one["check"]: one for one in json.loads((tmp_path / "report.json").read_text())["findings"]}
    assert "checkpoints of qwen3_next carry a trained MTP head" in found["mtp"]["finding"]
