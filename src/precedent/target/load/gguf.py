"""Loads GGUF files as they are: quantised matrices stay in the mapped file, everything else becomes parameters."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from math import prod
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import Digits, Sequence
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)

from precedent.errors import ConfigError, ModelLoadError, PrecedentError, UnsupportedError
from precedent.runtime.plain_values import in_one_line
from precedent.target.load.gguf_header import TensorEntry, end_tokens_in, parts_of, read_directory, sampling_in
from precedent.target.load.gguf_weights import PLAIN, GgufWeight, MappedFile
from precedent.target.load.source import quiet
from precedent.target.support import missing, quantised_kinds, quantised_layer

SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"})
"""Pre-tokenizers, by llama.cpp's names, that split numbers into digits before GPT-2's rule; transformers does not."""

OF_GPT2 = frozenset({"", "default", "gpt-2"})
"""Pre-tokenizers that are GPT-2's own, which transformers also uses for names that it does not know."""

SIMILAR_TOKENIZERS = {"gpt2": "gpt2", "llama": "llama"}
"""Kinds of tokenizers, by llama.cpp's names, each with an architecture whose tokenizer transformers reads."""

LONGEST_RUN = 256
"""No vocabulary has tokens of so many spaces."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides rotary frequencies, as Llama 3.1's scaling does."""

READ_IN_PART = ("qwen3", "qwen2moe", "qwen3moe")
UNREAD = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes in the headers of these architectures that transformers leaves at its defaults, and their names in a config."""

_GGUF_READER: Any = modeling_gguf_pytorch_utils
_SWAPPING = RLock()

_EXPERTS = re.compile(r"(blk\.\d+\.ffn_)(?:gate|up|down)(_exps\.weight)")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GgufFile:
    """A model's file, or the first of several parts: the metadata of the first, the tensors of all."""

    path: Path
    metadata: Mapping[str, Any]
    entries: tuple[tuple[Path, TensorEntry], ...] = field(repr=False)

    @cached_property
    def nbytes_by_kind(self) -> Counter[str]:
        """Bytes of the tensors of each type."""
        found = Counter[str]()
        for _, entry in self.entries:
            found[entry.kind] += entry.nbytes
        return found

    @cached_property
    def kept(self) -> frozenset[str]:
        """The names of the tensors that stay in the file on a CPU: matrices in blocks, and experts of nothing else."""
        kinds = quantised_kinds()
        blocks = {entry.name: len(entry.shape) for _, entry in self.entries if entry.kind in kinds}
        found = {name for name, dimensions in blocks.items() if dimensions == 2}
        for name, dimensions in blocks.items():
            named = _EXPERTS.fullmatch(name) if dimensions == 3 else None
            if named is not None and all(f"{named[1]}{part}{named[2]}" in blocks for part in ("gate", "up", "down")):
                found.add(name)
        return frozenset(found)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations on a CPU: that of most bytes, float32 beside quantised matrices."""
        (largest, _), *_ = self.nbytes_by_kind.most_common(1) or [("F32", 0)]
        return PLAIN[largest] if self.whole else torch.float32

    @property
    def whole(self) -> bool:
        """Whether no tensor is quantised."""
        return self.nbytes_by_kind.keys() <= PLAIN.keys()

    def in_memory(self, device: torch.device) -> Iterator[tuple[TensorEntry, bool, int]]:
        """Each tensor, whether it stays in the file on a device, and its bytes once it is loaded."""
        on_cpu = device.type == "cpu"
        kept = self.kept if on_cpu and not _read_by_transformers(self) else ()
        dtype = self.dtype if self.whole or on_cpu else torch.bfloat16
        for _, entry in self.entries:
            stays = entry.name in kept
            yield entry, stays, entry.nbytes if stays else prod(entry.shape) * dtype.itemsize


def open_gguf(file: Path) -> GgufFile:
    """Read the headers of a model's file, or of all its parts. Raises ModelLoadError, naming what is wrong."""
    parts = parts_of(file)
    for part in parts:
        if not part.is_file():
            raise ModelLoadError(f"{file} is one part of a model in {len(parts)}, and {part.name} is missing beside it")
    metadata, entries = read_directory(parts[0])
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or max(count, 1) != len(parts):
        raise ModelLoadError(
            f"{file} is one part of a model in {count} files: keep them together under the names that they had, "
            f"such as NAME-00001-of-{count:0>5}.gguf"
        )
    found = [(parts[0], entry) for entry in entries]
    for part in parts[1:]:
        found += [(part, entry) for entry in read_directory(part)[1]]
    if not found:
        raise ModelLoadError(f"{file} holds no tensors, as files of a vocabulary alone: get the file of the model")
    expected = metadata.get("split.tensors.count", len(found))
    if expected != len(found):
        raise ModelLoadError(f"the parts of {file} hold {len(found)} tensors in place of {expected}: get them again")
    return GgufFile(parts[0], metadata, tuple(found))


def load_gguf(
    file: Path, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype | None, settings: Mapping[str, Any]
) -> PreTrainedModel:
    """The model in a GGUF file of this config, its quantised matrices read where they are.

    With a `dtype`, or on another device than a CPU, all weights become ordinary parameters; quantised ones become
    bfloat16 unless told otherwise. Raises ModelLoadError, naming the tensor, for a file that does not hold the model of
    its header.
    """
    attention = dict(settings)
    places = attention.pop("device_map", None)
    if places is not None and (places != "auto" or torch.cuda.device_count() > 1):
        raise UnsupportedError(
            f"a GGUF file is loaded to one device: give device='cpu' or 'cuda:0' in place of device_map={places!r} "
            f"(device='auto') for {file}"
        )
    for name in sorted(attention.keys() - {"attn_implementation"}):
        raise ConfigError(f"model_kwargs cannot hold {name!r} for a GGUF file, only attn_implementation: {file}")
    content = open_gguf(file)
    quantised = dtype is None and device.type == "cpu"
    if dtype is None:
        dtype = content.dtype if quantised or content.whole else torch.bfloat16
    large = {
        entry.name: (entry.kind, held)
        for entry, stays, held in content.in_memory(device)
        if quantised and not stays and entry.kind not in PLAIN
    }
    if large:
        kinds, size = sorted({kind for kind, _ in large.values()}), sum(held for _, held in large.values()) / 1e9
        advice = "" if quantised_kinds() else f"; {missing('quantization', 'running them as they are')}"
        log.warning(
            "%s: weights of type %s are dequantised and take %.1f GB of memory%s",
            file.name, ", ".join(kinds), size, advice,
        )  # fmt: skip
    try:
        with quiet():
            if _read_by_transformers(content):
                model = _dequantised_by_transformers(content, dtype, attention, device)
            else:
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
                _Filling(content, model, device, dtype, quantised=quantised).run()
    except PrecedentError:
        raise
    except Exception as error:  # transformers raises all kinds of errors
        raise ModelLoadError(f"cannot load {file}: {in_one_line(error)}") from error
    # transformers takes the default of the config's class here, which is another checkpoint's token
    model.generation_config.eos_token_id = sorted(set(end_tokens_in(content.metadata).values())) or None
    model.generation_config.update(**sampling_in(content.metadata))
    model.config._name_or_path = str(file)
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


class _Filling:
    """Puts the tensors of a file into a model on the meta device; `quantised` matrices stay in the file."""

    def __init__(
        self, content: GgufFile, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, quantised: bool
    ) -> None:
        self.content, self.model, self.device, self.dtype = content, model, device, dtype
        self.staying = content.kept if quantised else frozenset[str]()
        architecture = str(content.metadata.get("general.architecture"))
        of_architecture = _GGUF_READER.TENSOR_PROCESSORS.get(architecture, _GGUF_READER.TensorProcessor)
        self.processor = of_architecture(config=model.config.to_dict())
        self.places: dict[str, str] = _names_in(model, self.processor)
        self.sizes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        files = {path: MappedFile(path) for path in {path for path, _ in content.entries}}
        self.weights = {entry.name: GgufWeight(files[path], entry) for path, entry in content.entries}
        self.found: dict[str, Tensor] = {}

    def run(self) -> None:
        """Fill the model. Raises ModelLoadError for a tensor that is missing or does not fit."""
        factors, experts = self.weights.pop(ROPE_FACTORS, None), self._experts_as_they_are()
        unused = [
            weight.name for weight in self.weights.values() if weight.name not in experts and not self._place(weight)
        ]
        for place, tensor in self.found.items():
            self.found[place] = tensor.to(self.device, self.dtype)
            self._check_shape(self._source_of(place), tuple(tensor.shape), self.sizes.get(place))
        self.model.load_state_dict(self.found, strict=False, assign=True)
        if "output.weight" not in self.weights:
            tie_head(self.model)
        for name, parameter in self.model.named_parameters():
            if parameter.is_meta:
                raise ModelLoadError(
                    f"{self.content.path} lacks the tensor {self._source_of(name)} of the model in its header: get it "
                    "again, or another file of the model"
                )
        fill_buffers(self.model, self.device)
        if factors is not None:
            self._divide_rotary(torch.from_numpy(factors.dequantised(slice(None))[0]).to(self.device))
        if unused:
            log.warning("%s: %s do not belong to this model", self.content.path.name, ", ".join(sorted(unused)[:4]))

    def _place(self, weight: GgufWeight) -> bool:
        """Put a tensor where it belongs; False if that is nowhere in this model."""
        name, shape = weight.name, weight.entry.shape
        place = self.places.get(name)
        if place is None and self.places.get(name.removesuffix(".weight")) is None:
            return False
        unchanged, weight.row_order = _row_order(self.processor, weight.entry)
        if place is not None and unchanged:
            owner, _, leaf = place.rpartition(".")
            module: Any = self.model.get_submodule(owner)
            layer = quantised_layer(module, [weight]) if name in self.staying and leaf == "weight" else None
            if layer is None:
                self.found[place] = weight.dense(self.dtype, self.device)
            else:
                self._check_shape(name, shape, self.sizes[place])
                self.model.set_submodule(owner, layer)
            return True
        numbers = weight.dequantised(slice(None)).reshape(shape)
        parsed: dict[str, dict[str, Tensor]] = {"tensors": self.found}
        result = self.processor.process(
            weights=numbers, name=name, tensor_key_mapping=self.places, parsed_parameters=parsed
        )
        if result.name is not None and place is not None:
            self.found[place] = torch.from_numpy(np.array(result.weights)).to(self.device, self.dtype)
        return True

    def _experts_as_they_are(self) -> set[str]:
        """Leave the experts of mixtures in the file where all of them are in blocks; returns their tensors' names."""
        found = set[str]()
        for owner, module in list(self.model.named_modules()):
            downs = [f"{name}.weight" for name, place in self.places.items() if place == f"{owner}.down_proj"]
            if downs and downs[0] in self.staying:
                names = [downs[0].replace("down", part) for part in ("gate", "up", "down")]
                layer = quantised_layer(module, [each for name in names for each in self.weights[name].experts()])
                if layer is not None:
                    self.model.set_submodule(owner, layer)
                    found.update(names)
        return found

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
        if expected not in (None, shape):
            raise ModelLoadError(
                f"the tensor {name} in {self.content.path} has the shape {shape}, and the model of its header "
                f"{expected}: the file is damaged, get it again"
            )

    def _source_of(self, place: str) -> str:
        return next((name for name, found in self.places.items() if found == place), place)

    def _divide_rotary(self, factors: Tensor) -> None:
        for module in self.model.modules():
            for name in ("inv_freq", "original_inv_freq"):
                frequencies: Any = getattr(module, name, None)
                if isinstance(frequencies, Tensor) and frequencies.shape == factors.shape:
                    frequencies /= factors


def _row_order(processor: Any, entry: TensorEntry) -> tuple[bool, NDArray[np.int64] | None]:
    """Whether transformers leaves a tensor's numbers as they are, and the order in which it takes its rows.

    That is found by letting it process the numbers of the rows. None is their order in the file.
    """
    if len(entry.shape) != 2:
        return False, None
    rows = np.arange(entry.shape[0])[:, None]
    try:
        result = processor.process(
            weights=rows, name=entry.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
    except (ValueError, KeyError, TypeError):  # it needs whole rows
        return False, None
    found = np.asarray(result.weights)
    if found.shape != rows.shape or not np.array_equal(np.sort(found, 0), rows):
        return False, None
    return True, None if np.array_equal(found, rows) else found[:, 0].copy()


@dataclass(frozen=True)
class _Names:
    """What transformers' map of names asks of a model: the names of its weights, and its base model's."""

    config: Any
    names: tuple[str, ...]
    prefix: str

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self.names)

    def named_children(self) -> list[tuple[str, _Names]]:
        start = f"{self.prefix}."
        inner = tuple(name.removeprefix(start) for name in self.names if self.prefix and name.startswith(start))
        return [(self.prefix, _Names(self.config, inner, ""))] if inner else []


def _names_in(model: PreTrainedModel, processor: Any) -> dict[str, str]:
    """The names of a model's weights by those of the tensors. transformers asks each of its modules: that is slow."""
    names: Any = _Names(model.config, tuple(model.state_dict()), model.base_model_prefix)
    found: dict[str, str] = _GGUF_READER.get_gguf_hf_weights_map(names, processor)
    return found


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no file holds, such as rotary frequencies, as transformers does after loading."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    with torch.no_grad():
        for module in model.modules():
            empty = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            for name, buffer in empty.items():
                module._buffers[name] = torch.empty_like(buffer, device=device)
            if empty:
                model._init_weights(module)


def tie_head(model: Any) -> None:
    """Let a head that has no weight of its own have the embeddings'."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight.is_meta:
        quantised = getattr(embedding, "quantised", None)
        if quantised is not None:
            model.set_output_embeddings(quantised_layer(head, [quantised]))
        elif not embedding.weight.is_meta:
            head.weight = embedding.weight


def _read_by_transformers(content: GgufFile) -> bool:
    """Whether transformers reads an architecture by weight conversions of its own, which no map of names describes."""
    name = "transformers.integrations.gguf"  # older versions do not have it
    known = getattr(importlib.import_module(name), "GGUF_ARCHS", ()) if importlib.util.find_spec(name) else ()
    return content.metadata.get("general.architecture") in known


def _dequantised_by_transformers(
    content: GgufFile, dtype: torch.dtype, settings: Mapping[str, Any], device: torch.device
) -> PreTrainedModel:
    if len(parts_of(content.path)) > 1:
        raise ModelLoadError(
            f"{content.path} is one part of several, which transformers does not read for this architecture; join them "
            "with `llama-gguf-split --merge` of llama.cpp"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise ModelLoadError(f"{content.path.name} needs more packages; run: pip install -U accelerate")
    how: Any = transformers.GgufConfig(dequantize=True)
    found: Any = AutoModelForCausalLM.from_pretrained(
        **_in(content.path), quantization_config=how, dtype=dtype, **settings
    )
    placed: PreTrainedModel = found.to(device)
    return placed


def read_config(file: Path) -> PreTrainedConfig:
    """The config of the model, without its weights; its dtype is that of activations. Raises ModelLoadError."""
    check_reader(file.name)
    content = open_gguf(file)
    try:
        with _our_reader(content):
            config: PreTrainedConfig = AutoConfig.from_pretrained(**_in(content.path))
    except Exception as error:  # an unknown architecture, or missing metadata
        raise ModelLoadError(f"transformers cannot read the model in {file}: {in_one_line(error)}") from error
    config.dtype = content.dtype
    architecture = content.metadata.get("general.architecture")
    if content.metadata.get(f"{architecture}.pooling_type"):
        raise UnsupportedError(f"{file} is an embedding model, which writes no text: give a model that answers")
    for key, name in UNREAD.items() if architecture in READ_IN_PART else ():
        size = content.metadata.get(f"{architecture}.{key}")
        if isinstance(size, int) and hasattr(config, name):
            setattr(config, name, size)
    _scale_rotary(config, content)
    return config


def _scale_rotary(config: Any, content: GgufFile) -> None:
    """Take over the scaling of rotary embeddings from the header, which transformers reads for few architectures.

    Raises UnsupportedError for a kind that cannot be taken over.
    """
    prefix = f"{content.metadata.get('general.architecture')}.rope.scaling"
    kind, factor = content.metadata.get(f"{prefix}.type", "none"), content.metadata.get(f"{prefix}.factor")
    rotary: Any = getattr(config, "rope_parameters", None)
    if kind == "none" or factor in (None, 0.0, 1.0) or not isinstance(rotary, dict):
        return
    own = rotary.get("full_attention", rotary)
    if own.get("rope_type", "default") != "default":
        return
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"{content.path} scales rotary embeddings by {kind!r}, which is not supported")
    own |= {"rope_type": kind, "factor": factor}
    original = content.metadata.get(f"{prefix}.original_context_length")
    if kind == "yarn" and original is not None:
        own["original_max_position_embeddings"] = original


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, splitting numbers as the model was trained to. Raises ModelLoadError."""
    check_reader(file.name)
    content = open_gguf(file)
    header = content.metadata
    kind = header.get("tokenizer.ggml.pre", "")
    try:
        tokenizer = _tokenizer_in(content)
    except ValueError as error:  # an architecture that only another back end knows; its tokenizer is one of few kinds
        similar = SIMILAR_TOKENIZERS.get(str(header.get("tokenizer.ggml.model")))
        if similar is None or "is not supported" not in str(error):
            raise
        tokenizer = _tokenizer_in(replace(content, metadata={**header, "general.architecture": similar}))
    if str(header.get("general.architecture")).startswith("gemma"):
        _match_runs_of_spaces(tokenizer)
    backend = tokenizer.backend_tokenizer
    if kind in SINGLE_DIGITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    elif kind not in OF_GPT2 and type(backend.pre_tokenizer).__name__ == "ByteLevel":
        log.warning(
            "%s: transformers does not know how a %r tokenizer splits text, and splits it as GPT-2 does; the model was "
            "trained on other tokens: give its original folder or id if answers are poor",
            file.name, kind,
        )  # fmt: skip
    length = header.get(f"{header.get('general.architecture')}.context_length")
    if isinstance(length, int):
        tokenizer.model_max_length = length
    tokenizer.name_or_path = str(file)
    return tokenizer


def _tokenizer_in(content: GgufFile) -> PreTrainedTokenizerBase:
    with _our_reader(content):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_in(content.path))
    return tokenizer


def check_reader(name: str) -> None:
    """Raise ModelLoadError where the package that knows the names of tensors is missing, or transformers is too old."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"{name} needs another package; run: pip install -U gguf")
    if transformers.__version__.startswith("5.17."):
        raise ModelLoadError(
            f"{name} needs transformers 5.18 or newer: {transformers.__version__} splits texts and ends answers "
            "of GGUF files wrongly; run: pip install -U transformers"
        )


def _match_runs_of_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let tokens of several spaces match whole, the longest first, as SentencePiece matches user-defined pieces.

    transformers leaves them to the merges, which make two tokens of 16 out of 32 spaces instead of 31 and 1.
    """
    vocabulary = tokenizer.get_vocab()
    runs = [token for length in range(2, LONGEST_RUN) if (token := "\N{LOWER ONE EIGHTH BLOCK}" * length) in vocabulary]
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in runs])


def _in(file: Path) -> dict[str, Any]:
    """The arguments that make transformers read a GGUF file."""
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


class _HeaderReader:
    """A `gguf.GGUFReader` for transformers that reads a header in a hundredth of its time, and all parts of a model."""

    def __init__(self, content: GgufFile) -> None:
        self.fields = {key: _Field(value) for key, value in content.metadata.items()}
        self.tensors = [entry for _, entry in content.entries]


class _Field:
    def __init__(self, value: Any) -> None:
        self.parts = value if isinstance(value, list) else [value]
        self.data, self.types = range(len(self.parts)), ()


@contextmanager
def _our_reader(content: GgufFile) -> Iterator[None]:
    """Let transformers read a file's header from what our reader found in it."""
    import gguf

    def metadata_of(file: object, texts: Container[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        """As transformers' own reader: of texts that were not asked for, their number."""
        metadata = content.metadata.items()
        found = {key: len(value) if _are_texts(value) and key not in texts else value for key, value in metadata}
        return found, tuple(entry.name for _, entry in content.entries)

    ours: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", lambda file: _HeaderReader(content)),
        (_GGUF_READER, "_gguf_parse_value", lambda value, types: value),
    ]
    for name in ("transformers.integrations.gguf", "transformers.integrations.gguf.reader"):
        ours.append((import_module(name), "read_gguf_metadata", metadata_of))
    with quiet(), _SWAPPING:
        theirs = [getattr(owner, name) for owner, name, _ in ours]
        for owner, name, own in ours:
            setattr(owner, name, own)
        try:
            yield
        finally:
            for (owner, name, _), its in zip(ours, theirs, strict=True):
                setattr(owner, name, its)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)
