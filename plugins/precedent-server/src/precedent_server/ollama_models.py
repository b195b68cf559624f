"""Ollama's routes that describe models: `/api/tags`, `/api/ps` and `/api/show`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.errors import PrecedentError
from precedent.langchain.profile import profile_of_engine, profile_of_files
from precedent.runtime.plain_values import is_number, shown
from precedent.target.kv.layer_kinds import UNLIMITED, context_length
from precedent.target.load.gguf import open_gguf
from precedent.target.load.gguf_header import read_header
from precedent.target.load.loading import load_config
from precedent.target.load.source import OLLAMA, stored_model
from precedent.target.load.stores import LATEST, SETTINGS, StoredModel
from precedent.target.load.weight_files import quant_method
from precedent_server.bodies import parsed
from precedent_server.errors import ApiError
from precedent_server.keys import Caller
from precedent_server.model_files import Stamp, allowed_names, local_path, stamp_of
from precedent_server.models import Entry
from precedent_server.serving import Serving
from precedent_server.transport import read_body, unless_gone

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16",
}  # fmt: skip
"""Quantisations of a whole GGUF file by `general.file_type`."""

FOREVER = datetime(2318, 1, 1, tzinfo=UTC)
"""When a model expires that stays loaded; Ollama's longest time ends in that year."""

LONGEST_METADATA = 1 << 16
"""Characters of one text of `model_info`."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files of a model tell; `size` is their bytes, `digest` changes with them."""

    size: int = 0
    digest: str = ""
    modified: datetime = FOREVER
    format: str = ""
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    template: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def details(self) -> dict[str, Any]:
        """Ollama's `details`."""
        families = [self.family] if self.family else None
        return {
            "parent_model": "", "format": self.format, "family": self.family, "families": families,
            "parameter_size": _in_words(self.parameters), "quantization_level": self.quantization,
        }  # fmt: skip


async def tags(serving: Serving, caller: Caller, request: Request) -> Response:
    """The models that requests may name, loaded or not."""
    entries = [(name, entry.target) for entry in serving.models.entries for name in entry.names]

    def described() -> list[dict[str, Any]]:
        known = {_tagged(name) for name, _ in entries}
        more = [(name, OLLAMA + name) for name in allowed_names(serving.models.allowed) if name not in known]
        return [_listed(name, facts_of(target)) for name, target in (*entries, *more)]

    return JSONResponse({"models": await serving.prepared(described)})


async def running_models(serving: Serving, caller: Caller, request: Request) -> Response:
    """The models that are loaded, and until when if nobody asks them."""
    loaded = [(entry, entry.instance) for entry in serving.models.entries if entry.instance is not None]
    facts = await serving.prepared(lambda: [facts_of(entry.target) for entry, _ in loaded])
    told = list[dict[str, Any]]()
    for (entry, instance), found in zip(loaded, facts, strict=True):
        seconds = serving.models.seconds_left(instance)
        until = FOREVER if math.isinf(seconds) else min(FOREVER, _after(seconds))
        device = getattr(instance.engine.target, "device", None)
        on_cpu = device is None or device.type == "cpu"
        for name in entry.names:
            told.append(
                _listed(name, found)
                | {
                    "size": instance.size,
                    "size_vram": 0 if on_cpu else instance.size,
                    "expires_at": until.isoformat(),
                    "context_length": instance.engine.context_length,
                }
            )
            del told[-1]["modified_at"]
    return JSONResponse({"models": told})


async def show(serving: Serving, caller: Caller, request: Request) -> Response:
    """A model's files, template, settings and capabilities; it need not be loaded."""
    body = await read_body(request, serving, parsed)
    name = body.get("model") or body.get("name")
    if not isinstance(name, str):
        raise ApiError(f"model={shown(name)} must be a model's name", param="model")
    entry = await serving.models.find(name)
    try:
        work = serving.prepared(partial(_described, entry, has_embedder=serving.cache_of(entry.names[0]) is not None))
        return JSONResponse(await unless_gone(request, serving.limits, work))
    finally:
        serving.models.forget_unused(entry)


def _described(entry: Entry, *, has_embedder: bool) -> dict[str, Any]:
    facts, stored, instance = facts_of(entry.target), _stored(entry.target), entry.instance
    profile = profile_of_files(entry.target) if instance is None else profile_of_engine(instance.engine)
    can = {"tools": "tool_calling", "thinking": "reasoning_output"}
    capabilities = ["completion", *(one for one, key in can.items() if profile and profile.get(key))]
    own = None if instance is None else getattr(instance.engine.tokenizer, "chat_template", None)
    template = (stored.template if stored else "") or (own if isinstance(own, str) else facts.template)
    named = {ours: theirs for theirs, ours in SETTINGS.items()}
    settings = [(named[key], one) for key, value in (stored.sampling if stored else {}).items() for one in _all(value)]
    return {
        "parameters": "\n".join(f"{key:<30} {json.dumps(one)}" for key, one in settings),
        "template": template,
        "details": facts.details,
        "model_info": facts.info,
        "capabilities": [*capabilities, *(["embedding"] if has_embedder else [])],
        "modified_at": facts.modified.isoformat(),
    } | ({"system": stored.system} if stored and stored.system else {})


def _listed(name: str, facts: Facts) -> dict[str, Any]:
    shown_name = _tagged(name)
    return {
        "name": shown_name, "model": shown_name, "modified_at": facts.modified.isoformat(), "size": facts.size,
        "digest": facts.digest or hashlib.sha256(name.encode()).hexdigest(), "details": facts.details,
    }  # fmt: skip


def facts_of(target: str) -> Facts:
    """What the files of a target tell; nothing about files that are not here, or that cannot be read."""
    try:
        path = local_path(target)
        return Facts() if path is None else _facts(path, stamp_of(target))
    except (PrecedentError, OSError, ValueError):  # loading the model says what is wrong
        return Facts()


@lru_cache(maxsize=256)
def _facts(path: Path, stamp: Stamp) -> Facts:
    files = [one for one in stamp if isinstance(one, tuple)]
    of_ollama = path.name.removeprefix("sha256-")
    digest = of_ollama if of_ollama != path.name else hashlib.sha256(repr(stamp).encode()).hexdigest()
    modified = datetime.fromtimestamp(max(changed for *_, changed in files) / 1e9, UTC)
    found = Facts(sum(size for _, size, _ in files), digest, modified)
    return _of_gguf(path, found) if path.is_file() else _of_folder(path, found)


def _of_gguf(path: Path, found: Facts) -> Facts:
    header, content = read_header(path), open_gguf(path)
    family, parameters = str(header.get("general.architecture", "")), sum(prod(one.shape) for _, one in content.entries)
    kinds: dict[str, int] = {}
    for _, entry in content.entries:
        kinds[entry.kind] = kinds.get(entry.kind, 0) + entry.nbytes
    quantization = FILE_TYPES.get(header.get("general.file_type", -1)) or max(kinds, key=lambda kind: kinds[kind])
    template = header.get("tokenizer.chat_template")
    info = {key: value for key, value in header.items() if _is_told(value) and value is not template}
    info["general.parameter_count"] = parameters
    template = template if isinstance(template, str) else ""
    return Facts(
        found.size, found.digest, found.modified, "gguf", family, parameters, quantization, template, info
    )  # fmt: skip


def _of_folder(path: Path, found: Facts) -> Facts:
    config = load_config(path)
    text, family = config.get_text_config(), str(config.model_type)
    shapes = [shape for file in path.glob("*.safetensors") for shape in _shapes(file)]
    parameters, length = sum(map(prod, shapes)), context_length(text)
    info = {
        "general.architecture": family, "general.parameter_count": parameters,
        f"{family}.context_length": None if length == UNLIMITED else length,
        f"{family}.embedding_length": getattr(text, "hidden_size", None),
        f"{family}.block_count": getattr(text, "num_hidden_layers", None),
    }  # fmt: skip
    quantization = quant_method(config) or str(config.dtype or "").removeprefix("torch.")
    file = path / "chat_template.jinja"
    return Facts(
        found.size, found.digest, found.modified, "safetensors", family, parameters, quantization,
        file.read_text("utf-8") if file.is_file() else "", {key: one for key, one in info.items() if one is not None},
    )  # fmt: skip


def _shapes(file: Path) -> Iterator[list[int]]:
    with safe_open(str(file), "numpy") as content:
        for name in content.keys():  # noqa: SIM118 (not a mapping)
            yield content.get_slice(name).get_shape()


def _stored(target: str) -> StoredModel | None:
    try:
        return stored_model(target, download=False)
    except (PrecedentError, OSError):
        return None


def _is_told(value: Any) -> bool:
    return (isinstance(value, str) and len(value) <= LONGEST_METADATA) or isinstance(value, bool) or is_number(value)


def _all(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _tagged(name: str) -> str:
    """A name as Ollama's clients know it: with a tag."""
    plain = name.removeprefix(OLLAMA)
    return plain if ":" in plain.rpartition("/")[2] else f"{plain}:{LATEST}"


def _in_words(number: int) -> str:
    """A number of parameters as in 1.7B; empty if it is not known."""
    for size, sign in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.4g}{sign}" if number < 10 * size else f"{number / size:.1f}{sign}"
    return str(number or "")


def _after(seconds: float) -> datetime:
    try:
        return datetime.now(UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return FOREVER
