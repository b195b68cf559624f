"""Checkpoints of Hugging Face with quantised linear layers on a CPU: packed by a quantiser, or made from their numbers.

Packed codes are read where they lie, as GPTQ, AWQ, compressed-tensors and torchao store them in safetensors files; no
package of theirs is needed. `quantization="int8"` and `"int4"` make codes of a checkpoint that has none, each time a
band is read, so that nothing is kept beside the mapped files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from precedent.errors import ModelLoadError, UnsupportedError
from precedent.target.load.gguf import fill_buffers, tie_head
from precedent.target.load.gguf_weights import MappedFile
from precedent.target.load.weight_files import safetensors_files
from precedent.target.quantised import QuantisedWeight, Rows
from precedent.target.support import Reader
from precedent_cpu.codes import Band, CodedWeight, Layout
from precedent_cpu.quantised_linear import QuantisedLinear, layer_over, shapes_of_experts

GROUP = 32

MORE_BITS = ("v_proj", "down_proj")
"""Layers that have eight bits in `int4` too: half of its error comes from them, as the mixes of GGUF files know."""

DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1",
}  # fmt: skip
"""Types of numbers in safetensors files, as numpy reads them; bfloat16 is the upper half of a float32."""

AWQ_ORDER = np.array((0, 4, 1, 5, 2, 6, 3, 7))
"""Which four bits of a word hold the output of a number, as AWQ interleaves eight of them."""

LARGEST_GROUPS = (128, 64, 32, 16)
"""Sizes of groups that kernels know; larger groups are read as several of these with one scale."""

Numbers = NDArray[Any]

Outputs = NDArray[np.int64]
"""Numbers of some outputs."""

FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a mapped safetensors file."""

    name: str
    file: MappedFile
    start: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def array(self) -> Numbers:
        """Its numbers as they are stored."""
        flat = self.file.content[self.start : self.start + self.nbytes]
        return flat.view(DTYPES[self.dtype]).reshape(self.shape)

    def release(self) -> None:
        """Drop the file's pages from memory."""
        self.file.release(self.start, self.start + self.nbytes)

    def floats(self, which: Any = ...) -> NDArray[np.float32]:
        """Some of its numbers, which are floating-point. Raises ModelLoadError if one is not finite."""
        found = self.array[which]
        if self.dtype == "BF16":
            found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        numbers: NDArray[np.float32] = found.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise ModelLoadError(
                f"the tensor {self.name} in {self.file.path} has numbers that are not finite: get the file again"
            )
        return numbers

    def of_outputs(self, index: Outputs, *, across: bool) -> NDArray[np.float32]:
        """Floating-point numbers of some outputs, `[outputs, groups]`; `across`: the file has `[groups, outputs]`."""
        return self.floats((slice(None), index)).T if across else self.floats(index).reshape(len(index), -1)

    @property
    def precision(self) -> str:
        """The name of its floating-point type."""
        return {"F16": "float16", "BF16": "bfloat16"}.get(self.dtype, "float32")


class CheckpointFiles:
    """The tensors of a folder's safetensors files by name, mapped."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Stored] = {}
        self.metadata: dict[str, str] = {}
        for path in safetensors_files(folder):
            self._read(MappedFile(path))

    def _read(self, file: MappedFile) -> None:
        try:
            size = int(file.content[:8].view("<u8")[0])
            header = json.loads(file.content[8 : 8 + size].tobytes())
            self.metadata |= header.pop("__metadata__", {})
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                shape, dtype = tuple(entry["shape"]), entry["dtype"]
                known = DTYPES.get(dtype)
                if known is not None and last - first != prod(shape) * np.dtype(known).itemsize:
                    raise ValueError(f"{name} has {last - first} bytes for the shape {shape}")
                if not 0 <= first <= last <= len(file.content) - 8 - size:
                    raise ValueError(f"{name} reaches beyond the file")
                self.tensors[name] = Stored(name, file, 8 + size + first, last - first, dtype, shape)
        except (AttributeError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ModelLoadError(f"{file.path} is damaged ({error}): get it again") from error

    def get(self, name: str, *dtypes: str) -> Stored | None:
        """A tensor of one of the types; None if there is no such tensor, or it has another type."""
        found = self.tensors.get(name)
        return found if found is not None and found.dtype in dtypes else None


class StoredWeight(CodedWeight):
    """A matrix whose codes, scales, and zero points or minima are `parts` of their own.

    `codes`, `zeros` and `lows` take the numbers of some outputs and give codes `[outputs, inputs]`, and zero points and
    minima `[outputs, groups]`; `across` is that of `Stored.of_outputs`, for the scales. Without zero points `offset` is
    taken from every code.
    """

    def __init__(
        self, name: str, kind: str, shape: tuple[int, int], bits: int, parts: Sequence[Stored | None], scales: Stored,
        codes: Callable[[Outputs], NDArray[np.uint8]], *, across: bool = False, offset: int = 0,
        zeros: Callable[[Outputs], Numbers] | None = None, lows: Callable[[Outputs], Numbers] | None = None,
        order: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.kind, (self.out_features, self.in_features) = name, kind, shape
        self.order = None if order is None or np.array_equal(order, np.arange(shape[1])) else order
        self._parts = [part for part in (*parts, scales) if part is not None]
        self._codes, self._scales, self._across, self._zeros, self._lows = codes, scales, across, zeros, lows
        whole = shape[1] // (scales.shape[0] if across else max(1, scales.array.size // shape[0]))
        group = next((size for size in LARGEST_GROUPS if whole % size == 0), whole)
        if not across:
            _check(scales, (shape[0], *scales.shape[1:]))
        if not whole or shape[1] % group:
            raise ModelLoadError(f"{name} has {shape[1]} inputs, which are no groups of {group}")
        self._repeats, precision, minima = whole // group, scales.precision, lows is not None
        if zeros is not None:
            found = zeros(np.arange(shape[0]))
            if (found == int(found.flat[0])).all():
                self._zeros, offset = None, int(found.flat[0])
            else:
                offset, minima, precision = 0, True, "float32"
        self.layout = Layout(bits, group, offset=offset, minima=minima, scale_dtype=precision)

    def rows(self, which: Rows) -> Band:
        """The codes of some outputs, with scales and minima."""
        index = np.arange(self.out_features)[which]
        codes, scales = self._codes(index), self._scales.of_outputs(index, across=self._across)
        minima = None if self._lows is None else self._lows(index)
        if self._zeros is not None:
            minima = -scales * self._zeros(index)
        return Band(
            np.ascontiguousarray(codes if self.order is None else codes[:, self.order]),
            np.repeat(scales, self._repeats, 1), None if minima is None else np.repeat(minima, self._repeats, 1),
        )  # fmt: skip

    @property
    def stored(self) -> Numbers:
        """Bytes of all parts, one after the other."""
        return np.concatenate([part.array.reshape(-1).view(np.uint8) for part in self._parts])

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts)

    def release(self) -> None:
        """Drop the files' pages from memory."""
        for part in self._parts:
            part.release()


class MadeWeight(CodedWeight):
    """Codes that are made of a matrix of numbers whenever a band is read, the same ones each time."""

    def __init__(self, numbers: Stored, kind: str) -> None:
        self.name, self.kind, self._numbers = numbers.name, kind, numbers
        self.out_features, self.in_features = numbers.shape
        self.layout = Layout(8, GROUP, offset=128) if kind == "int8" else Layout(4, GROUP, minima=True)

    def rows(self, which: Rows) -> Band:
        """The codes of some outputs, with scales and minima."""
        groups = self._numbers.floats(which).reshape(-1, self.in_features // GROUP, GROUP)
        if self.kind == "int8":
            scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
            levels = groups * _inverse(scales)[..., None]
            codes = np.clip(np.rint(levels), -127, 127) + 128
            lows = None
        else:
            lowest, highest = np.minimum(groups.min(-1), 0), groups.max(-1)
            lows = lowest.astype(np.float16)
            scales = ((highest - lows) / np.float32(15)).astype(np.float16)
            codes = np.clip(np.rint((groups - lows[..., None].astype(np.float32)) * _inverse(scales)[..., None]), 0, 15)
        if not np.isfinite(scales).all():
            raise ModelLoadError(
                f"the tensor {self.name} has numbers beyond those of float16: it cannot be {self.kind}"
            )
        minima = None if lows is None else lows.astype(np.float32)
        return Band(codes.astype(np.uint8).reshape(-1, self.in_features), scales.astype(np.float32), minima)

    def numbers(self, which: Rows) -> NDArray[np.float32]:
        """Some outputs as the checkpoint has them."""
        return self._numbers.floats(which)

    @property
    def stored(self) -> Numbers:
        """The numbers from which the codes are made."""
        return self._numbers.array

    @property
    def nbytes(self) -> int:
        """Bytes that the codes take with their scales."""
        return self.out_features * self.in_features // GROUP * (34 if self.kind == "int8" else 20)

    def release(self) -> None:
        """Drop the file's pages from memory."""
        self._numbers.release()


def _inverse(scales: NDArray[np.float16]) -> NDArray[np.float32]:
    wide = scales.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)


Weights = Callable[[str, tuple[int, int]], QuantisedWeight | None]
"""Finds the quantised weight of a module by its name and shape; None where the checkpoint has none for it."""


def weights_of(files: CheckpointFiles, settings: Mapping[str, Any]) -> Weights | None:
    """What reads the weights of a quantiser's settings; None for settings that nothing here reads."""
    method, bits = settings.get("quant_method"), settings.get("bits", settings.get("w_bit"))
    if method == "gptq" and bits in (4, 8):
        return lambda name, shape: _gptq(files, settings, int(bits), name, shape)
    if method == "awq" and bits == 4 and str(settings.get("version", "gemm")).lower() == "gemm":
        return lambda name, shape: _awq(files, name, shape)
    if method == "compressed-tensors" and settings.get("format") in ("pack-quantized", "int-quantized"):
        groups = settings.get("config_groups", {}).values()
        if all(_is_integer(group.get("weights")) for group in groups):
            return lambda name, shape: _compressed(files, name, shape)
    if method == "torchao" and files.metadata.get("tensor_names"):
        return lambda name, shape: _torchao(files, name, shape)
    return None


def quantiser_settings(config: Any) -> dict[str, Any]:
    """What a config says of how its checkpoint was quantised; nothing for one that was not."""
    settings = getattr(config, "quantization_config", None) or {}
    return dict(settings if isinstance(settings, Mapping) else settings.to_dict())


def _is_integer(weights: Any) -> bool:
    return isinstance(weights, Mapping) and weights.get("type", "int") == "int" and weights.get("num_bits") in (4, 8)


def _bits_of(words: Numbers, bits: int, axis: int) -> NDArray[np.uint8]:
    """The codes in words of 32 bits, the lowest first, along an axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    moved = np.moveaxis(words.view(np.uint32), axis, -1)[..., None] >> shifts
    codes = (moved & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return np.moveaxis(codes.reshape(*codes.shape[:-2], -1), -1, axis)


def _gptq(
    files: CheckpointFiles, settings: Mapping[str, Any], bits: int, name: str, shape: tuple[int, int]
) -> QuantisedWeight | None:
    """Words of codes along the inputs, zero points along the outputs, and the group of every input.

    The first version of the format stores a zero point less one.
    """
    words, zeros = files.get(f"{name}.qweight", "I32"), files.get(f"{name}.qzeros", "I32")
    scales, groups_of = files.get(f"{name}.scales", *FLOATS), files.get(f"{name}.g_idx", "I32")
    if words is None or zeros is None or scales is None:
        return None
    (outputs, inputs), groups, order = shape, scales.shape[0], None
    _check(words, (inputs * bits // 32, outputs))
    _check(scales, (groups, outputs))
    _check(zeros, (groups, outputs * bits // 32))
    more, mask = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1, (1 << bits) - 1
    if groups_of is not None:
        _check(groups_of, (inputs,))
        order = np.argsort(groups_of.array, kind="stable")
        if not np.array_equal(groups_of.array[order], np.arange(inputs) // (inputs // groups)):
            raise ModelLoadError(
                f"{groups_of.name} in {groups_of.file.path} does not put the inputs into groups of one size"
            )
    return StoredWeight(
        name, f"GPTQ {bits}", shape, bits, (words, zeros, groups_of), scales,
        lambda index: _bits_of(words.array[:, index], bits, 0).T, across=True, order=order,
        zeros=lambda index: (_bits_of(zeros.array, bits, 1).T[index].astype(np.int32) + more & mask).astype(np.float32),
    )  # fmt: skip


def _awq(files: CheckpointFiles, name: str, shape: tuple[int, int]) -> QuantisedWeight | None:
    """Words of codes and of zero points along the outputs, in AWQ's order."""
    words, zeros = files.get(f"{name}.qweight", "I32"), files.get(f"{name}.qzeros", "I32")
    scales = files.get(f"{name}.scales", *FLOATS)
    if words is None or zeros is None or scales is None:
        return None
    (outputs, inputs), groups = shape, scales.shape[0]
    _check(words, (inputs, outputs // 8))
    _check(scales, (groups, outputs))
    _check(zeros, (groups, outputs // 8))

    def codes_in(packed: Stored, index: Outputs) -> NDArray[np.uint8]:
        shifts = (4 * AWQ_ORDER[index % 8]).astype(np.uint32)
        return (packed.array[:, index // 8].view(np.uint32) >> shifts & np.uint32(15)).astype(np.uint8).T

    return StoredWeight(
        name, "AWQ", shape, 4, (words, zeros), scales, lambda index: codes_in(words, index), across=True,
        zeros=lambda index: codes_in(zeros, index).astype(np.float32),
    )  # fmt: skip


def _compressed(files: CheckpointFiles, name: str, shape: tuple[int, int]) -> QuantisedWeight | None:
    """Signed codes, in bytes or packed in words with half of their range added; scales of groups or of outputs."""
    words, plain = files.get(f"{name}.weight_packed", "I32"), files.get(f"{name}.weight", "I8")
    scales, source = files.get(f"{name}.weight_scale", *FLOATS), words or plain
    if scales is None or source is None:
        return None
    outputs, inputs = shape
    bits = 8 if words is None else words.shape[1] * 32 // inputs
    if bits not in (4, 8):
        raise ModelLoadError(f"{source.name} in {source.file.path} has the shape {source.shape} for {inputs} inputs")
    _check(source, (outputs, inputs * bits // 32 if words is not None else inputs))
    groups_of, order = files.get(f"{name}.weight_g_idx", "I32"), None
    if groups_of is not None and (groups_of.array >= 0).all():
        order = np.argsort(groups_of.array, kind="stable")
    half, zeros = 1 << (bits - 1), files.get(f"{name}.weight_zero_point", "I32", "I8")

    def codes(index: Outputs) -> NDArray[np.uint8]:
        found = source.array[index]
        return _bits_of(found, bits, 1) if words is not None else found.view(np.uint8) ^ np.uint8(128)

    def zero_points(index: Outputs) -> Numbers:
        assert zeros is not None
        if zeros.dtype == "I32":
            return _bits_of(zeros.array.reshape(-1, scales.array.size // outputs), bits, 0)[index].astype(np.float32)
        return zeros.array.reshape(outputs, -1)[index].astype(np.float32) + np.float32(half)

    return StoredWeight(
        name, f"compressed-tensors {bits}", shape, bits, (source, zeros, groups_of), scales, codes, offset=half,
        zeros=None if zeros is None else zero_points, order=order,
    )  # fmt: skip


def _torchao(files: CheckpointFiles, name: str, shape: tuple[int, int]) -> QuantisedWeight | None:
    """`Int4Tensor` and the tensors of eight bits: plain codes, and scales that come before the outputs in the former.

    The number of an `Int4Tensor` is `(code - 8) * scale + zero`, of the others `(code - zero) * scale`.
    """
    described = files.metadata.get(f"{name}.weight")
    said: dict[str, Any] = json.loads(described) if described else {}
    kind, attributes, (outputs, inputs) = said.get("_type"), said.get("_data", {}), shape
    packed = files.get(f"{name}._weight_qdata", "U8", "I8")
    scales = files.get(f"{name}._weight_scale", *FLOATS)
    zeros = files.get(f"{name}._weight_zero_point", *FLOATS, "I8", "I32")
    if packed is None or scales is None or kind not in ("Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"):
        return None
    if any(files.tensors.get(f"{name}._weight_{part}") for part in ("act_pre_scale", "act_quant_scale")):
        return None
    if kind == "Int4Tensor":
        _check(packed, (outputs, inputs // 2))

        def codes(index: Outputs) -> NDArray[np.uint8]:
            found = packed.array[index].view(np.uint8)
            return np.stack([found & 15, found >> 4], -1).reshape(len(index), inputs) ^ np.uint8(8)

        lows = zeros if zeros is not None and zeros.floats().any() else None
        return StoredWeight(
            name, "torchao int4", shape, 4, (packed, zeros), scales, codes, across=True, offset=8,
            lows=None if lows is None else lambda index: lows.of_outputs(index, across=True),
        )  # fmt: skip
    _check(packed, (outputs, inputs))
    if any(attributes.get(key) for key in ("act_quant_kwargs", "activation_quantization")):
        return None

    def zero_points(index: Outputs) -> Numbers:
        assert zeros is not None
        found = zeros.floats() if zeros.dtype in FLOATS else zeros.array.astype(np.float32)
        return found.reshape(outputs, -1)[index] + np.float32(128)

    return StoredWeight(
        name, "torchao int8", shape, 8, (packed, zeros), scales,
        lambda index: packed.array[index].view(np.uint8) ^ np.uint8(128), offset=128,
        zeros=None if zeros is None else zero_points,
    )  # fmt: skip


def _check(part: Stored, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError, naming the tensor, if it has another shape than the model asks for."""
    if part.shape != shape:
        raise ModelLoadError(
            f"the tensor {part.name} in {part.file.path} has the shape {part.shape}, and the model needs {shape}"
        )


def reader_of(folder: Path, config: PreTrainedConfig, quantization: str | None) -> Reader | None:
    """What loads a model whose linear layers read the codes of a quantiser, or codes made by `quantization`.

    None for codes that nothing here reads; it returns None where some weights have no place in the model.
    """
    files = CheckpointFiles(folder)
    if quantization is not None:
        return lambda how: _made(folder, files, config, quantization, how)
    weights = weights_of(files, quantiser_settings(config))
    if weights is None:
        return None

    def read(how: Mapping[str, Any]) -> PreTrainedModel | None:
        found = _Assembly(folder, files, config, how).run(weights)
        packed = found is not None and any(isinstance(part, QuantisedLinear) for part in found.modules())
        return found if packed else None

    return read


def _made(
    folder: Path, files: CheckpointFiles, config: PreTrainedConfig, quantization: str, how: Mapping[str, Any]
) -> PreTrainedModel:
    """A checkpoint of ordinary numbers, quantised as it is read. Embeddings and head have eight bits in both ways.

    Raises UnsupportedError, naming the model, for one whose weights are not under the names of its modules.
    """

    def weights(name: str, shape: tuple[int, int]) -> QuantisedWeight | None:
        stored = files.get(f"{name}.weight", *FLOATS)
        if stored is None or stored.shape != shape or shape[1] % GROUP:
            return None
        return MadeWeight(stored, "int8" if name in ends or name.endswith(MORE_BITS) else quantization)

    assembly = _Assembly(folder, files, config, how)
    ends = assembly.ends
    found = assembly.run(weights)
    if found is None:
        raise UnsupportedError(
            f"quantization={quantization!r} is not available for {config.model_type}: {assembly.missing} is not in "
            f"{folder} under that name; give a checkpoint or GGUF file that is quantised already"
        )
    return found


class _Assembly:
    """A model on the meta device that is filled from a folder's files."""

    def __init__(self, folder: Path, files: CheckpointFiles, config: PreTrainedConfig, how: Mapping[str, Any]) -> None:
        self.folder, self.files, self.missing = folder, files, ""
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
        names = {module: name for name, module in self.model.named_modules()}
        parts: Iterable[Any] = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        self.ends = tuple(names[part] for part in parts if part is not None)

    def run(self, weights: Weights) -> PreTrainedModel | None:
        """The model; None, and what is `missing`, if some weight is not under the name of its module."""
        for name, module in list(self.model.named_modules()):
            shapes = shapes_of_experts(module)
            if shapes is None:
                shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
                found = [weights(name, shape) if len(shape) == 2 else None]
            else:
                experts = (
                    (f"{name}.{number}.{part}_proj", of) for part, of in shapes.items() for number in range(of[0])
                )
                found = [weights(expert, of[1:]) for expert, of in experts]
            quantised = [weight for weight in found if weight is not None]
            layer = layer_over(module, quantised) if len(quantised) == len(found) else None
            if layer is not None:
                self.model.set_submodule(name, layer)
        self._tie()
        tensors: dict[str, Tensor] = {}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            stored = self.files.get(name, *FLOATS)
            if tensor.is_meta and stored is not None and stored.shape == tuple(tensor.shape):
                tensors[name] = torch.from_numpy(stored.floats())
                stored.release()
        self.model.load_state_dict(tensors, strict=False, assign=True)
        self._tie()
        self.missing = next((name for name, tensor in self.model.named_parameters() if tensor.is_meta), "")
        if self.missing:
            return None
        fill_buffers(self.model, torch.device("cpu"))
        try:
            self.model.generation_config = GenerationConfig.from_pretrained(self.folder)
        except OSError:  # it has none
            self.model.generation_config = GenerationConfig.from_model_config(self.model.config)
        self.model.config._name_or_path = str(self.folder)
        ready: PreTrainedModel = self.model.eval().requires_grad_(False)
        return ready

    def _tie(self) -> None:
        if self.model.config.tie_word_embeddings:
            tie_head(self.model)
