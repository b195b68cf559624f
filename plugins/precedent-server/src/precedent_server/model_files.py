"""Files of models: which ones a name means, how many bytes they take, and when they changed. Nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from precedent.engine.engine import Engine
from precedent.errors import ConfigError, PrecedentError
from precedent.runtime.stored_tensors import stored_tensors
from precedent.target.load.gguf import open_gguf
from precedent.target.load.gguf_header import parts_of
from precedent.target.load.source import (
    HUB_FILE,
    LM_STUDIO,
    OLLAMA,
    base_of_adapter,
    gguf_file,
    is_adapter,
    stored_model,
)
from precedent.target.load.stores import LATEST, is_model, ollama_names

Stamp = tuple[object, ...]
"""What identifies a model's files and settings as they are now."""

LONGEST_NAME = 500
"""Characters of a name that a client may have looked for."""

_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class AllowedModel:
    """A model that a client may have loaded: its name in full, what is loaded, and a key that its aliases share."""

    name: str
    target: str
    key: str


def spellings(name: str) -> Iterator[str]:
    """The names that a client may mean: with a tag, `NAME:latest` is NAME, and `NAME:TAG` the file NAME-TAG."""
    base, _, tag = name.rpartition(":")
    yield name
    if base and "/" not in tag:
        yield base if tag == LATEST else f"{base}-{tag}"
    else:
        yield f"{name}:{LATEST}"
    if not name.startswith((OLLAMA, LM_STUDIO, HUB_FILE)):
        yield from (OLLAMA + name, f"{OLLAMA}{name}:{LATEST}")
        if tag == LATEST:
            yield OLLAMA + base


def models_in(folder: Path) -> dict[str, Path]:
    """The GGUF files and checkpoint folders in a folder, by name. Raises ConfigError if it cannot be read."""
    try:
        inside = sorted(folder.expanduser().iterdir())
    except OSError as error:
        raise ConfigError(f"--model-dir {str(folder)!r} cannot be read: {error.strerror or error}") from error
    found = dict[str, Path]()
    for path in inside:
        if path.is_file() and is_model(path.name):
            found[_PART.sub("", path.stem)] = path
        elif (path / "config.json").is_file() or (path.is_dir() and is_adapter(path)):
            found[path.name] = path
    return found


def allowed_model(name: str, patterns: Sequence[str]) -> AllowedModel | None:
    """The model on this machine that a client's name means; None if no pattern allows it, or there is none.

    Names are those of Ollama, of LM Studio, `hf:OWNER/REPOSITORY[:QUANT]` and ids of the hub, never paths.
    """
    for full in _full_names(name) if len(name) <= LONGEST_NAME else ():
        if any(_matches(full, pattern) for pattern in patterns) and (found := _on_this_machine(full)) is not None:
            return found
    return None


def allowed_names(patterns: Sequence[str]) -> list[str]:
    """The names in Ollama's store that a pattern allows."""
    names = ollama_names() if patterns else []
    return [name for name in names if any(_matches(OLLAMA + name, pattern) for pattern in patterns)]


def _full_names(name: str) -> Iterator[str]:
    if name.startswith((LM_STUDIO, HUB_FILE)):
        yield name
        return
    of_ollama = name.removeprefix(OLLAMA)
    yield f"{OLLAMA}{of_ollama}{'' if ':' in of_ollama.rpartition('/')[2] else f':{LATEST}'}"
    if _REPOSITORY.fullmatch(name) and not Path(name).exists():
        yield name


def _matches(full: str, pattern: str) -> bool:
    """Whether a pattern allows a name in full; case does not count, as in the stores."""
    given, wanted = full.casefold(), pattern.casefold()
    untagged = given.removesuffix(f":{LATEST}") if given.startswith(OLLAMA) else given
    return fnmatchcase(given, wanted) or fnmatchcase(untagged, wanted)


def _on_this_machine(full: str) -> AllowedModel | None:
    try:
        if full.startswith((OLLAMA, LM_STUDIO)):
            stored = stored_model(full, download=False)
            if stored is None:
                return None
            kept = (stored.sampling, stored.system, stored.template)
            return AllowedModel(full, full, f"{stored.file} {kept!r}")
        path = local_path(full)
    except (PrecedentError, OSError, ValueError):  # why it is not there is not the client's to know
        return None
    return None if path is None else AllowedModel(full, str(path), str(path))


def local_path(target: str) -> Path | None:
    """The GGUF file or the folder of a target; None if it is not on this machine. Raises ModelLoadError."""
    if (file := gguf_file(target, download=False)) is not None:
        return file
    folder = Path(target).expanduser()
    if folder.is_dir():
        return folder
    with suppress(LocalEntryNotFoundError, HFValidationError):
        folder = Path(snapshot_download(target, local_files_only=True))
        return folder if (folder / "config.json").is_file() else None
    return None


def stamp_of(target: str) -> Stamp:
    """The files of a target with their sizes and times, and the settings that a store keeps with them."""
    path, stored = local_path(target), stored_model(target, download=False)
    if path is None:
        return ()
    files = parts_of(path) if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())
    kept = "" if stored is None else repr((stored.sampling, stored.system, stored.template))
    states = ((file, file.stat()) for file in files)
    return (kept, *((str(file.resolve()), state.st_size, state.st_mtime_ns) for file, state in states))


def file_bytes(target: str, device: torch.device | None = None) -> int:
    """Bytes that a target's weights will take on a device (None: a CPU), by its files; 0 if they are not here.

    Those of a checkpoint as they are stored, adapters and drafts not counted.
    """
    path = local_path(target)
    if path is None:
        return 0
    if path.is_file():
        return sum(held for _, _, held in open_gguf(path).in_memory(device or torch.device("cpu")))
    if is_adapter(path):
        return file_bytes(base_of_adapter(path), device)
    files = list(path.glob("*.safetensors")) or list(path.glob("*.bin"))
    return sum(file.stat().st_size for file in files)


def weight_bytes(engine: Engine) -> int:
    """Bytes of the weights of an engine's target, shared ones once; a scripted engine has no target."""
    return sum({_place(one): one.nbytes for one in _weights(engine)}.values())


def _weights(engine: Engine) -> Iterator[Any]:
    target = getattr(engine, "target", None)
    for weight in target.weights().values() if target is not None else ():
        if isinstance(weight, torch.Tensor):
            yield from stored_tensors(weight)
        elif hasattr(weight, "nbytes"):
            yield weight


def _place(weight: Any) -> int:
    return int(weight.data_ptr()) if isinstance(weight, torch.Tensor) else id(weight)
