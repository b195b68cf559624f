"""What an engine is built from, in one place: every way to an engine takes an `EngineOptions`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from precedent.cache import SpeculationCache
from precedent.cache.store_url import Place, place_of
from precedent.config import EngineLimits, SpeculationConfig
from precedent.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precedent.cache import Embedder

OF_LOADING = ("device", "dtype", "quantization", "accurate", "model_kwargs", "chat_template", "backend", "n_gpu_layers")
"""Options that say how a target is loaded by name; a model object is loaded already and takes none of them."""

BACKENDS = ("precedent", "llama.cpp", "auto")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is built from. Raises ConfigError for a `cache` that is neither open nor a place.

    - `draft_model`: a Hugging Face id, a folder, "first-layers:N" or a loaded model; None drafts without one.
    - `cache`: an open speculation cache, which stays its owner's to close, or the folder, file or URL of one. Engines
      of one process share the cache of a place.
    - `embedder`: embeds for a `cache` given by its place: a sentence-transformers id or folder, or an object.
    - `speculation`: the defaults of every request.
    - `limits`: how much the engine does and holds at once.
    - `device`: where the target goes; None is cuda where there is one, else cpu, and "auto" spreads its layers.
    - `draft_device`: where the draft model goes; None is the target's device.
    - `dtype`: the target's precision; None or "auto" keeps the weights as they are stored.
    - `quantization`: "int8" or "int4" quantises a checkpoint's linear layers while it is loaded, on a CPU
      (docs/how-to/model-files.md).
    - `accurate`: inputs of products with quantised weights keep 16 bits instead of 8.
    - `backend`: what computes a GGUF file: "precedent" (None too), "llama.cpp" (docs/how-to/llama-cpp.md), or "auto",
      which is llama.cpp where that was built for a GPU or alone knows the architecture.
    - `n_gpu_layers`: how many layers llama.cpp computes on a GPU; None is all of them, where it was built for one.
    - `model_kwargs`: passed to transformers' `from_pretrained` (`quantization_config`, `device_map`, `revision`, ...),
      or settings of llama.cpp (`n_ctx`, `n_threads`, `flash_attn`, ...).
    - `chat_template`: replaces the model's own: a text, a file, or a family's name (chatml, llama-3, gemma, mistral,
      phi-3).
    - `bitwise`: greedy and seeded texts do not depend on rounding: they are the same whatever is drafted, reused or
      answered beside them. A model or machine that cannot do this is refused.
    - `cuda_graphs`: steps are replayed as CUDA graphs (docs/how-to/gpu.md), or the model is refused.
    - `loop`: the name of an installed package's decode loop (entry-point group `precedent.loops`); None is the built-in
      one.
    - `keep_prefixes`: the keys and values of system prompts and tools are kept beside the cache, which is one on disk,
      so that a new process does not compute them again (docs/explanation/memory.md).
    """

    draft_model: str | Path | PreTrainedModel | None = None
    cache: SpeculationCache | Place | None = None
    embedder: str | Embedder | None = None
    speculation: SpeculationConfig | None = None
    limits: EngineLimits | None = None
    device: str | None = None
    draft_device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    accurate: bool = False
    backend: str | None = None
    n_gpu_layers: int | None = None
    model_kwargs: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold a token of the hub
    chat_template: str | Path | None = None
    bitwise: bool = False
    cuda_graphs: bool = False
    loop: str | None = None
    keep_prefixes: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache", cache_or_place(self.cache))  # a URL keeps its password to itself

    def with_changes(self, **changes: Any) -> Self:
        """These options with some of them replaced. Raises ConfigError for an unknown name."""
        known = [option.name for option in fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"an engine has no option {name!r}; known: {', '.join(known)}")
        return replace(self, **changes)

    def key(self) -> Hashable:
        """Equal for options of equal names, paths and numbers and the same objects."""
        return key_of([getattr(self, option.name) for option in fields(self)])

    def check(self) -> None:
        """Raise ConfigError for an option that would be ignored beside the others, or lacks what it needs."""
        if self.backend not in (None, *BACKENDS):
            raise ConfigError(f"backend={self.backend!r} is not one of {', '.join(BACKENDS)}")
        if not isinstance(self.model_kwargs, Mapping | None):
            raise ConfigError(f"model_kwargs must be a dict of settings, got {type(self.model_kwargs).__name__}")
        if self.n_gpu_layers is not None and self.backend in (None, BACKENDS[0]):
            raise ConfigError("n_gpu_layers is for llama.cpp: give backend='llama.cpp' or backend='auto' as well")
        if self.draft_model is None and self.draft_device is not None:
            raise ConfigError(f"draft_device={self.draft_device!r} is for a draft model: give draft_model= as well")
        cache = self.cache
        if self.embedder is not None and isinstance(cache, SpeculationCache):
            raise ConfigError("an open cache has its embedder already: leave embedder out, or open the cache with it")
        on_disk = cache.prefixes is not None if isinstance(cache, SpeculationCache) else isinstance(cache, str | Path)
        if self.keep_prefixes and not on_disk:
            raise ConfigError(
                "keep_prefixes=True keeps prefixes beside a speculation cache on disk: give its folder or file as well"
            )
        if self.loop is not None:
            from precedent.decoding.loop import loop_class  # here: it loads torch

            loop_class(self.loop)

    def check_loaded(self) -> None:
        """Raise ConfigError for an option that only a target loaded by name can have."""
        for option in fields(self):
            if option.name in OF_LOADING and getattr(self, option.name) not in (option.default, {}):
                raise ConfigError(f"{option.name} is for loading by name: a model object is loaded already")


def key_of(value: Any) -> Hashable:
    """A key that is equal for equal names, paths and numbers, for mappings and lists of them, and for the same object.

    A key holds the objects in it: as long as it exists, no other object can be mistaken for one of them.
    """
    if isinstance(value, Path):
        return str(value.expanduser().resolve())
    if isinstance(value, Mapping):
        return frozenset((name, key_of(part)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(key_of(part) for part in value)
    if hasattr(value, "to_dict") and type(value).__hash__ is None:  # quantisation configs compare by their settings
        return type(value).__name__, key_of(value.to_dict())
    return value if isinstance(value, Hashable) else _ByIdentity(value)


class _ByIdentity:
    """Equal only to the key of the very same object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def cache_or_place(cache: object) -> SpeculationCache | Place | None:
    """An open cache as it is, else where one lies. Raises ConfigError for what is neither, without showing it."""
    return cache if isinstance(cache, SpeculationCache) else place_of(cache)
