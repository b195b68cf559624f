"""Tells drafts that go beside a target from whole models, by their files, whether or not their package is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from precedent.errors import ModelLoadError
from precedent.target.load.weight_files import tensor_names

TRAINED = "draft.json"
"""The file of a draft's folder that `precedent train-draft` writes, which is no checkpoint."""

OWN_VOCABULARY = ("draft_vocab_size", "truncated_vocab_size")
"""Fields that name the size of a vocabulary that is smaller than the target's."""

_IN_NAMES, _OF_MODELS = ("dflash", "dspark", "eagle", "medusa"), ("vl", "conditionalgeneration")
"""What the names of drafts' architectures contain, and those of whole models by such a name (NVIDIA's Eagle)."""

_HEADS = ("fc.weight", "hidden_norm.weight")
"""Tensors that tell a head from a model of one layer, where its config does not."""


def draft_at(source: str | Path, where: Mapping[str, Any] | None = None) -> str | None:
    """What the files at a source call the draft that they hold; None for what may be a whole model.

    `where` are arguments of `from_pretrained` that choose the files.
    """
    if Path(source).expanduser().is_file():  # a GGUF file
        return None
    trained = Path(source).expanduser() / TRAINED
    if trained.is_file():
        try:
            target = str(json.loads(trained.read_text(encoding="utf-8"))["target"])
        except (OSError, ValueError, TypeError, KeyError):
            target = "a target that it does not name"
        return f"a draft model without embeddings, trained for {target}"
    config = config_at(source, **(where or {}))
    name = _name_in(config)
    if name is None and config.get("num_hidden_layers") == 1 and Path(source).is_dir():
        name = "unnamed" if any(tensor.endswith(_HEADS) for tensor in tensor_names(Path(source))) else None
    return None if name is None else f"a draft that reads its target ({name})"


def check_whole(source: str | Path, where: Mapping[str, Any] | None = None) -> None:
    """Raise ModelLoadError for a draft, which is no model by itself."""
    found = draft_at(source, where)
    if found is not None:
        raise ModelLoadError(
            f"{source} holds {found}, and no model by itself: give it as the draft model beside the target that it was "
            "trained for"
        )


def check_readable(source: str | Path) -> None:
    """Raise ModelLoadError for a draft that no installed package recognised."""
    found = draft_at(source)
    if found is not None:
        raise ModelLoadError(f"{source} holds {found}, which needs a package: pip install 'precedent-llm[drafts]'")


def config_at(source: str | Path, **where: Any) -> dict[str, Any]:
    """What `config.json` says; nothing where it cannot be read."""
    try:
        return dict(PreTrainedConfig.get_config_dict(str(source), **where)[0])
    except Exception:  # whatever is wrong, loading a model from it fails as well, and says so
        return {}


def is_named_draft(config: Mapping[str, Any]) -> bool:
    """Whether the architecture's name is that of a draft."""
    name = architecture_of(config).lower()
    return any(word in name for word in _IN_NAMES) and not any(word in name for word in _OF_MODELS)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The name of a config's architecture, which may be empty."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _name_in(config: Mapping[str, Any]) -> str | None:
    """What a config calls the draft that it is surely of; None for what may be a whole model."""
    for said in (config.get("speculators_model_type"), config.get("kind")):  # the latter is that of our own drafts
        if isinstance(said, str):
            return said
    own = "dflash_config" in config or any(config.get(name) for name in OWN_VOCABULARY)
    return architecture_of(config) or "unnamed" if own or is_named_draft(config) else None
