"""Finds published drafts by their names: folders here, and repositories on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel

from precedent.errors import ConfigError, ModelLoadError
from precedent.target.block.dflash import dflash_settings, load_dflash
from precedent.target.block.settings import holds_block_draft
from precedent.target.checkpoint import CONFIG, INDEX, OLDER, safetensors_files
from precedent.target.eagle.head import load_eagle
from precedent.target.eagle.settings import EagleSettings
from precedent.target.published import EAGLE, PublishedDraft, looks_published, names_draft, published_draft


def find_published(source: str | Path, *, weights: bool = True) -> PublishedDraft | None:
    """The published draft in a folder, or in a repository of the hub, whose files are then fetched; None for others.

    Without `weights` only the config is fetched. Raises UnsupportedError, naming it, for a draft of a kind that is not
    read.
    """
    if isinstance(source, Path):
        return published_draft(source)
    return published_draft(_fetched(source, weights)) if looks_published(_config_of(source)) else None


def load_published(draft: PublishedDraft, target: PreTrainedModel) -> PreTrainedModel:
    """Load a published draft beside its target. Raises what `load_eagle` and `load_dflash` raise."""
    return load_eagle(draft, target) if draft.kind == EAGLE else load_dflash(draft, target)


def described(draft: PublishedDraft, target: PreTrainedConfig) -> str:
    """What a published draft is beside a target of this text config. Raises what loading would, as far as it tells."""
    draft.layers(target)
    if draft.kind == EAGLE:
        reads = EagleSettings.of(draft, target).reads
        return f"{draft}; it reads layers {', '.join(map(str, reads))} of the target"
    settings = dflash_settings(draft, target, target.vocab_size)
    reads = settings.reads
    return f"{draft}; it fills {settings.block_size} positions from layers {', '.join(map(str, reads))} of the target"


def reads_its_target(spec: str | Path) -> bool:
    """Whether a draft model's name is the folder of a draft that reads its target, and is no model by itself."""
    place = Path(spec).expanduser()
    return holds_block_draft(place) or published_draft(place) is not None


def check_whole(source: str | Path, settings: Mapping[str, Any] | None = None) -> None:
    """Raise ModelLoadError for a draft that reads its target, which is no model by itself."""
    name = names_draft(_config_of(source, **(settings or {})))
    if name is not None:
        raise ModelLoadError(
            f"{source} holds a draft that reads its target ({name}), and no model by itself: give it as the draft "
            "model beside the target that it was trained for"
        )


def check_place(draft: object, place: object, target: PreTrainedModel) -> None:
    """Raise ConfigError for a draft that reads its target and is to be on another device than that."""
    if place != target.device:
        raise ConfigError(f"{draft} runs beside its target, on {target.device}: leave out draft_device")


def _config_of(source: str | Path, **where: Any) -> dict[str, Any]:
    """What `config.json` says; nothing where it cannot be read."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(str(source), **where)
    except Exception:  # whatever is wrong, loading a model from it fails as well, and says so
        return {}
    return dict(config)


def _fetched(name: str, weights: bool) -> Path:
    """The folder of a repository's config, and of its weights."""
    folder = Path(snapshot_download(name, allow_patterns=[CONFIG, INDEX, "*.safetensors"] if weights else [CONFIG]))
    if weights and not safetensors_files(folder):
        snapshot_download(name, allow_patterns=[OLDER])
    return folder
