"""Finds GGUF files that other programs keep: Ollama's store, LM Studio's folders, and the Hugging Face hub's cache.

A model of Ollama's is a manifest, `manifests/HOST/NAMESPACE/MODEL/TAG`, whose layers are files named by their digest:
the weights, a system message, parameters, a template. Names and digests are checked before they become paths.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from precedent.config import SamplingParams
from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.runtime.hub import silence_of_hub
from precedent.runtime.plain_values import in_one_line
from precedent.target.load.gguf_header import is_gguf, parts_of

OLLAMA_FOLDERS = ("~/.ollama/models", "/usr/share/ollama/.ollama/models", "/var/lib/ollama")
"""Ollama's store without `OLLAMA_MODELS`: of a user, of the service that its installer makes, of distributions."""

MANIFESTS = ("manifests-v2", "manifests")
OLLAMA_HOSTS = ("registry.ollama.ai", "ollama.com")
NAMESPACE, LATEST = "library", "latest"

LAYER = "application/vnd.ollama.image."
MANIFEST_LIST = "application/vnd.ollama.manifest.list.v2+json"
WITHOUT_EFFECT = frozenset({"license", "embed", "draft"})
"""Layers that change no answer."""

REFUSED = {
    "adapter": "an adapter: merge it into the model's weights",
    "projector": "a projector for images; for texts alone give the file of its language model, {file}",
    "messages": "messages that begin every conversation; give its file, {file}, and write them into your prompts",
    "tensor": "tensors that are not in a GGUF file: pull another tag of it",
}

SETTINGS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "stop": "stop", "seed": "seed",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "num_predict": "max_tokens",
}  # fmt: skip
"""Parameters of Ollama's, and their names in `SamplingParams`."""

OTHER_SAMPLERS = {
    "mirostat": 0, "tfs_z": 1, "typical_p": 1, "rope_frequency_base": 0, "rope_frequency_scale": 1,
}  # fmt: skip
"""Parameters that change answers and have no counterpart, with the values that change nothing."""

OF_RUNNING = frozenset({
    "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "low_vram",
    "f16_kv", "numa", "num_gqa", "vocab_only", "logits_all", "embedding_only", "draft_num_predict", "mirostat_eta",
    "mirostat_tau", "repeat_last_n", "penalize_newline",
})  # fmt: skip

OLLAMA_TEMPERATURE = 0.8
"""Ollama's temperature for a model whose parameters say how to sample, but no temperature."""

NO_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of the names of GGUF files that are not models of their own, as in llama.cpp."""

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")

MOST_TEXT = 4 << 20
"""Bytes of a manifest or a layer of text, at most."""

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_NAME_PART = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_HOST = re.compile(r"\w[\w.:-]{0,255}", re.ASCII)
_FILE = re.compile(r"\w[^/\\:]{0,254}")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A GGUF file that another program keeps, and what the program keeps with it.

    - `name`: the name that was asked for.
    - `sampling`: settings by their names in `SamplingParams`.
    - `system`: the system message of conversations that have none.
    - `template`: a chat template that is not in Jinja, and so is not read.
    - `context`: tokens that the program holds at once; None is the model's own length.
    - `notes`: what was read and has no effect.
    """

    name: str
    file: Path
    sampling: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""
    template: str = ""
    context: int | None = None
    notes: tuple[str, ...] = ()


# Ollama


def ollama_stores() -> list[Path]:
    """The folders that may hold Ollama's models."""
    given = os.environ.get("OLLAMA_MODELS", "").strip().strip("\"'")
    return [Path(folder).expanduser() for folder in ([given] if given else OLLAMA_FOLDERS)]


def ollama_names() -> list[str]:
    """The names of all models in Ollama's stores that can be read."""
    found = dict[str, None]()
    for store in ollama_stores():
        for manifest in (one for folder in MANIFESTS for one in listed(store / folder, "*/*/*/*")):
            host, namespace, model, tag = manifest.parts[-4:]
            if all(map(_NAME_PART.fullmatch, (namespace, model, tag))) and _HOST.fullmatch(host):
                known = host in OLLAMA_HOSTS
                before = [] if known and namespace == NAMESPACE else [namespace] if known else [host, namespace]
                found["/".join([*before, f"{model}:{tag}"])] = None
    return sorted(found)


def ollama_model(name: str) -> StoredModel:
    """Find a model by Ollama's name, `[HOST/][NAMESPACE/]MODEL[:TAG]`.

    Raises ModelLoadError, saying what to pull, for what is not there, incomplete or damaged, and UnsupportedError for
    layers and parameters that change answers and cannot be applied. Raises OSError for files that cannot be read.
    """
    store, manifest = _manifest(name)
    again = f"run `ollama pull {name}` again"
    layers: dict[str, list[Path]] = {}
    for layer in manifest:
        kind = str(layer.get("mediaType", "")).removeprefix(LAYER)
        layers.setdefault(kind, []).append(Path() if kind == "tensor" else _blob(store, layer, name))
    models = layers.pop("model", [])
    for kind in layers:
        if kind in REFUSED:
            file = models[0] if models else name
            raise UnsupportedError(f"Ollama's {name} comes with {REFUSED[kind].format(file=file)}")
        if kind not in (*WITHOUT_EFFECT, "template", "prompt", "system", "params"):
            raise UnsupportedError(f"Ollama's {name} has a layer of an unknown kind, {kind!r}: give a GGUF file itself")
    if len(models) != 1:
        why = f"is split over {len(models)} files" if models else "has no weights here (it runs on Ollama's servers)"
        raise UnsupportedError(f"Ollama's {name} {why}: give a Hugging Face id or a GGUF file")
    if not is_gguf(models[0]):
        raise ModelLoadError(f"the weights of Ollama's {name}, {models[0]}, are not a GGUF file: {again}")
    texts = {kind: _text(layers[kind][-1], again) for kind in layers if kind not in WITHOUT_EFFECT}
    given = _object(texts["params"], layers["params"][-1], again) if "params" in texts else {}
    sampling, notes = _sampling(given, name, models[0])
    context = given.get("num_ctx")
    return StoredModel(
        name, models[0], sampling, texts.get("system", ""), texts.get("template") or texts.get("prompt", ""),
        context if isinstance(context, int) and context > 0 else None, tuple(notes),
    )  # fmt: skip


def _manifest(name: str) -> tuple[Path, list[dict[str, Any]]]:
    """The store that has a model of this name, and the model's layers. Raises ModelLoadError."""
    place, unread = _ollama_parts(name), list[str]()
    for store in ollama_stores():
        for folder in MANIFESTS:
            for host in OLLAMA_HOSTS if place[0] in OLLAMA_HOSTS else place[:1]:
                try:
                    path = entry(store / folder, [host, *place[1:]])
                except OSError as error:
                    unread.append(f"{store} cannot be read ({error.strerror or error})")
                    continue
                if path is not None:
                    return store, _layers(store, path, name)
    advice = f"run `ollama pull {name}`"
    of_hub = place[0] in ("hf.co", "huggingface.co")
    if of_hub or (place[0] in OLLAMA_HOSTS and place[1] != NAMESPACE):
        advice += f", or write 'hf:{name.partition('/')[2] if of_hub else name}' to download it from the hub"
    if unread:
        advice = f"{unread[0]}: run as a user who may read it, or copy it and set OLLAMA_MODELS; else {advice}"
    elif names := ollama_names():
        advice += f"; it has {', '.join(names[:6])}{', …' if len(names) > 6 else ''}"
    else:
        advice += f", or set OLLAMA_MODELS (looked in {', '.join(map(str, ollama_stores()))})"
    raise ModelLoadError(f"Ollama's store has no model {name!r}: {advice}")


def _ollama_parts(name: str) -> list[str]:
    """Host, namespace, model and tag. Raises ModelLoadError."""
    rest, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        rest, tag = name, LATEST
    parts = rest.split("/")
    found = [*(OLLAMA_HOSTS[0], NAMESPACE)[: 3 - len(parts)], *parts, tag]
    if len(found) != 4 or not _HOST.fullmatch(found[0]) or not all(map(_NAME_PART.fullmatch, found[1:])):
        raise ModelLoadError(
            f"{name!r} is not a name of Ollama's: write [HOST/][NAMESPACE/]MODEL[:TAG], as in llama3.2:3b"
        )
    return found


def _layers(store: Path, path: Path, name: str) -> list[dict[str, Any]]:
    """The layers of a manifest; of a list of manifests, of that for Ollama's own runners. Raises ModelLoadError."""
    again = f"run `ollama pull {name}` again"
    manifest = _object(_text(path, again), path, again)
    if manifest.get("mediaType") == MANIFEST_LIST:
        listed = manifest.get("manifests")
        ours = [one for one in listed if one.get("runner") in ("ollama", "llamacpp")] if _are_objects(listed) else []
        if not ours:
            raise UnsupportedError(f"Ollama's {name} has no GGUF file, only {REFUSED['tensor']}")
        manifest = ours[0]
        if "layers" not in manifest:
            path = _blob(store, manifest, name)
            manifest = _object(_text(path, again), path, again)
    layers = manifest.get("layers")
    if not _are_objects(layers):
        raise ModelLoadError(f"the manifest {path} lists no layers: {again}")
    return layers


def _blob(store: Path, layer: Mapping[str, Any], name: str) -> Path:
    """The file of a layer. Raises ModelLoadError if it is missing or has another size."""
    again, digest, size = f"run `ollama pull {name}` again", layer.get("digest"), layer.get("size")
    found = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if found is None:
        raise ModelLoadError(
            f"the manifest of Ollama's {name} names a layer {digest!r}, which is not a digest: {again}"
        )
    paths = [store / "blobs" / f"sha256{sign}{found[1]}" for sign in "-:"]  # before 0.1.32 with a colon
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ModelLoadError(f"a layer of Ollama's {name} is missing, {paths[0]}: {again}")
    if size is not None and path.stat().st_size != size:
        raise ModelLoadError(
            f"{path}, a layer of Ollama's {name}, has {path.stat().st_size:,} bytes of {size}: {again}"
        )
    return path


def _sampling(given: Mapping[str, Any], name: str, file: Path) -> tuple[dict[str, Any], list[str]]:
    """Parameters as settings, and notes. Raises ModelLoadError and UnsupportedError."""
    found, notes = dict[str, Any](), list[str]()
    for key, value in given.items():
        if value is None or (key in ("seed", "num_predict") and value in (-1, -2)):  # any seed, no limit
            continue
        if key in SETTINGS:
            found[SETTINGS[key]] = 0 if key == "top_k" and value == -1 else value
        elif key in OTHER_SAMPLERS and value != OTHER_SAMPLERS[key]:
            raise UnsupportedError(
                f"Ollama's {name} sets {key} to {value!r}, which is not supported: give its file, {file}, and settings "
                "of your own"
            )
        elif key not in OTHER_SAMPLERS and key not in OF_RUNNING:
            notes.append(f"the unknown parameter {key!r} is not applied")
    if found.keys() & {"top_k", "top_p", "min_p"}:
        found.setdefault("temperature", OLLAMA_TEMPERATURE)
    try:
        checked = SamplingParams(**found)
    except ConfigError as error:
        raise ModelLoadError(f"the parameters of Ollama's {name} cannot be used: {error}") from error
    if checked.repetition_penalty != 1:
        notes.append("repeat_penalty counts the whole text, not only its last tokens")
    return {key: getattr(checked, key) for key in found}, notes


def _text(path: Path, again: str) -> str:
    try:
        if path.stat().st_size > MOST_TEXT:
            raise ValueError(f"larger than {MOST_TEXT:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path} of Ollama's store ({error}): {again}") from error


def _object(text: str, path: Path, again: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} of Ollama's store is not a JSON object: {again}")
    return found


def _are_objects(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


# LM Studio


def lm_studio_folders() -> list[Path]:
    """The folders that may hold LM Studio's models."""
    pointer, homes = (
        Path.home() / ".lmstudio-home-pointer",
        [Path.home() / ".lmstudio", Path.home() / ".cache/lm-studio"],
    )
    found = list[Path]()
    with suppress(OSError, ValueError):
        homes.insert(0, Path(pointer.read_text(encoding="utf-8-sig").strip()))
    for home in homes:
        with suppress(OSError, ValueError, AttributeError, TypeError):
            chosen = json.loads((home / "settings.json").read_text(encoding="utf-8-sig")).get("downloadsFolder")
            found.append(Path(chosen).expanduser())
        found.append(home / "models")
    return list(dict.fromkeys(found))


def lm_studio_names() -> list[str]:
    """The names of all models in LM Studio's folders that can be read."""
    files = [file.parts[-3:] for folder in lm_studio_folders() for file in listed(folder, "*/*/*.gguf")]
    return sorted({"/".join(file) for file in files if is_model(file[-1])})


def lm_studio_file(name: str) -> Path:
    """Find the file of a model by LM Studio's name, `PUBLISHER/MODEL[/FILE]`. Raises ModelLoadError and OSError."""
    parts = name.split("/")
    if len(parts) not in (2, 3) or not all(map(_FILE.fullmatch, parts)):
        raise ModelLoadError(
            f"{name!r} is not a name of LM Studio's: write PUBLISHER/MODEL or PUBLISHER/MODEL/FILE.gguf"
        )
    for folder in lm_studio_folders():
        found = entry(folder, parts)
        if found is None and len(parts) == 3:
            found = entry(folder, (*parts[:2], f"{parts[2]}.gguf"))
        if found is None:
            continue
        files = [file for file in found.iterdir() if is_model(file.name)] if len(parts) == 2 else [found]
        if len(files) == 1:
            return files[0]
        if not files:
            raise ModelLoadError(
                f"{found} holds no GGUF file: MLX models do not run here, download another format of it"
            )
        listed = ", ".join(sorted(file.name for file in files))
        raise ModelLoadError(f"LM Studio's {name} has several files: write lmstudio:{name}/FILE, of {listed}")
    known = lm_studio_names()
    advice = f"it has {', '.join(known[:6])}" if known else f"looked in {', '.join(map(str, lm_studio_folders()))}"
    raise ModelLoadError(f"LM Studio has no model {name!r} here: download it there (`lms get {name}`); {advice}")


# The hub


def hub_file(name: str, settings: Mapping[str, Any], *, download: bool = True) -> Path:
    """The GGUF file of `OWNER/REPOSITORY[:QUANT]`, chosen as llama.cpp's `-hf` does, of several parts the first.

    It is taken from the hub's cache, or downloaded with all parts. `settings` are arguments of `from_pretrained`.
    Raises ModelLoadError.
    """
    given, _, quant = name.partition(":")
    if not _REPOSITORY.fullmatch(given) or not re.fullmatch(r"[\w.-]*", quant):
        raise ModelLoadError(
            f"'hf:{name}' is not a name on the hub: write hf:OWNER/REPOSITORY:QUANT, as in …-GGUF:Q4_K_M"
        )
    where = {key: settings[key] for key in ("revision", "cache_dir") if key in settings}
    repository = _as_cached(given, Path(where.get("cache_dir") or constants.HF_HUB_CACHE))
    cached = dict[str, Path]()
    with suppress(LocalEntryNotFoundError, HFValidationError):
        folder = Path(snapshot_download(repository, **where, local_files_only=True))
        cached = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.gguf")}
        chosen = choose(cached, quant)
        if chosen is not None and all(part.is_file() for part in parts_of(cached[chosen])):
            return cached[chosen]
    token = settings.get("token")
    alone = "local_files_only is given" if settings.get("local_files_only") or not download else None
    silence = alone or silence_of_hub(repository, token)
    if silence is not None:
        here = ", ".join(file for file in cached if is_model(file)) or "none"
        raise ModelLoadError(
            f"no such file of {repository} is on this machine (others: {here}), and the Hugging Face hub cannot be "
            f"asked ({silence.rstrip(' .')}); fetch it where there is a network with `hf download {repository} "
            f"--include '*{quant or DEFAULT_QUANTS[0]}*.gguf'`"
        )
    try:
        listed = HfApi().list_repo_files(repository, revision=where.get("revision"), token=token)
        chosen = choose(listed, quant)
        if chosen is not None:
            log.warning("downloading %s of %s", chosen, repository)
            parts = [part.as_posix() for part in parts_of(Path(chosen))]
            first, *_ = [Path(hf_hub_download(repository, part, **where, token=token)) for part in parts]
            return first
    except Exception as error:  # depends on the HTTP client that the hub's library uses
        raise ModelLoadError(f"the hub did not give the files of {repository}: {in_one_line(error)}") from error
    known = ", ".join(file for file in listed if is_model(file)) or "no GGUF file: give its id, without hf:"
    raise ModelLoadError(f"{repository} has no file of {quant or 'any quantisation'}; it has {known}")


def choose(files: Iterable[str], quant: str) -> str | None:
    """The first file of a quantisation, of none Q4_K_M, Q8_0 or the first model; None if there is none."""
    models = [file for file in files if is_model(file)]
    for wanted in [quant] if quant else DEFAULT_QUANTS:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        if found := next((file for file in models if pattern.search(file)), None):
            return found
    return None if quant or not models else models[0]


def is_model(file: str) -> bool:
    """Whether a name is that of a GGUF file with a model, of several parts the first."""
    name = file.rpartition("/")[2]
    first = parts_of(Path(name))[0].name == name
    return name.endswith(".gguf") and first and not any(part in name for part in NO_MODELS)


def _as_cached(repository: str, cache: Path) -> str:
    """A repository's name as it is written in the cache; the hub ignores case, and file systems may not."""
    folder = f"models--{repository.replace('/', '--')}"
    found = None
    with suppress(OSError):
        found = entry(cache, [folder])
    return repository if found is None else found.name.removeprefix("models--").replace("--", "/")


# Folders


def entry(folder: Path, names: Iterable[str]) -> Path | None:
    """The path of names below a folder, whatever their case; None if there is none. Raises OSError."""
    for name in names:
        try:
            inside = [one.name for one in folder.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return None
        same = [one for one in inside if one.casefold() == name.casefold()]
        if not same:
            return None
        folder /= name if name in same else min(same)
    return folder


def listed(folder: Path, pattern: str) -> Iterator[Path]:
    """The files that match below a folder; none where it cannot be read."""
    with suppress(OSError):
        yield from sorted(folder.glob(pattern))
