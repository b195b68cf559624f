"""Runs whole decoder layers for few rows on a CPU: prepares the jobs and buffers, and starts torch's threads on them.

Module by module, a layer of a small model spends about as long between its products as in them. Here the threads go
through one layer, or all layers, together (`layer_work`). Kernels and rounding are those of `row_products`, `norm` and
`row_attention`: a row gives the same result as module by module, and does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import from_dtype
from torch import Tensor

from precedent.runtime.compiled import Int64s
from precedent.target.kv.rows import RowMasks, within
from precedent_cpu.kernel_code import CACHE_LINE, LANES
from precedent_cpu.layer_work import CONSTANTS, JOB, NORMS, OF_THE_LAYER, SEQUENCE, WEIGHTS, attention_work, layers_work
from precedent_cpu.quantised_products import quantised_room, records_bytes
from precedent_cpu.row_attention import QUERIES, Sight
from precedent_cpu.row_products import barrier, by_tiles, run_on_team, thread_memory
from precedent_cpu.tile_products import DEPTH, tile_room

_AT = {name: offset // 8 for name, (_, offset, *_) in (JOB.fields or {}).items()}
"""Index of a field in a job viewed as 64-bit integers, which is much faster than as a record."""

_CALL = slice(_AT["base"], _AT["base"] + 5)
"""`base`, `hidden_rows`, `sequences`, `cosines`, `sines`."""

_ROOM = slice(_AT["scratch"], _AT["scratch"] + 2)
"""`scratch`, `scratch_bytes`."""

_COUNTS = slice(_AT["rows"], _AT["rows"] + 4)
"""`rows`, `num_sequences`, `width`, `together`."""

_LAYER_FROM = _AT[OF_THE_LAYER[0]]
"""Index of the first field that belongs to the layer, not to the call."""


class LayerShape(NamedTuple):
    """The sizes of a layer, counted in numbers."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int


class Part(NamedTuple):
    """One sequence's rows: how many, the length of the prefix before them, and which keys they see."""

    rows: int
    prefix: int
    sight: Sight


def job_of(
    shape: LayerShape,
    dtype: torch.dtype,
    constants: Sequence[float],
    products: Sequence[Tensor | Int64s],
    biases: Sequence[Tensor | None],
    norms: Sequence[tuple[Tensor, float] | None],
    quantised: int,
) -> Int64s:
    """The constant fields of a layer's job, as integers. The tensors must live as long as the job.

    `constants`, `products` (`[out, in]` each, with float32 biases) and `norms` (a weight and an epsilon) are in the
    order of `layer_work.CONSTANTS`, `WEIGHTS` and `NORMS`; all tensors but biases have one dtype, bfloat16 or float32.
    Quantised products are given as the `FIELDS` of packed weights, which hold their biases; `quantised` is as in `JOB`.
    """
    job = _shaped(shape, dtype)
    job["quantised"] = quantised
    job["barrier"], job["tiles"] = barrier(), not quantised and by_tiles(dtype, DEPTH)
    for name, constant in zip(CONSTANTS, constants, strict=True):
        job[name] = constant
    for name, weight, bias in zip(WEIGHTS, products, biases, strict=True):
        job[name] = weight.data_ptr() if isinstance(weight, Tensor) else weight.ctypes.data
        job[f"{name}_bias"] = 0 if bias is None else bias.data_ptr()
    for name, norm in zip(NORMS, norms, strict=True):
        if norm is not None:
            job[name], job[f"{name}_epsilon"] = norm[0].data_ptr(), norm[1]
    numbers: Int64s = job.view(np.int64)
    return numbers


def _shaped(shape: LayerShape, dtype: torch.dtype) -> Any:
    """A job, `[1]`, that has only its sizes and its dtype."""
    job = np.zeros(1, JOB)
    job["wide"] = dtype == torch.float32
    for name, size in shape._asdict().items():
        job[name] = size
    return job


class RowLayers:
    """The rows of one forward and their buffers, for layers of one shape."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype, parts: Sequence[Part], *, quantised: int = 0) -> None:
        self._parts, self._size, self._threads = parts, dtype.itemsize, torch.get_num_threads()
        self._quantised = quantised
        self._table = np.zeros((len(parts), SEQUENCE), dtype=np.int64)
        rows = 0
        for line, part in zip(self._table, parts, strict=True):
            line[:3] = rows, part.rows, part.prefix
            sight = part.sight
            line[9:12] = sight.starts.ctypes.data, sight.columns.ctypes.data, sight.skipped
            line[12:] = sight.hidden.ctypes.data, sight.path
            rows += part.rows
        self.rows = rows
        self._common = self._job(shape, rows)

    def _job(self, shape: LayerShape, rows: int) -> Int64s:
        """The fields of a job that all layers share."""
        width = max(
            _whole(part.prefix - part.sight.skipped) + _whole(part.sight.most) + 2 * LANES for part in self._parts
        )
        together = max(1, QUERIES // (shape.heads // shape.kv_heads))
        buffers = _buffers(shape, rows, self._size, quantised=self._quantised)
        longest = max(shape.hidden, shape.heads * shape.dim, shape.inner)
        room = quantised_room(longest) if self._quantised else tile_room(rows, longest)
        scratch = _lines(max(4 * _scratch_numbers(shape, width, together), room))
        self._memory = thread_memory("layers", sum(buffers.values()) + self._threads * scratch)
        job, place = np.zeros(_LAYER_FROM, dtype=np.int64), self._memory.data_ptr()
        for name, size in buffers.items():
            job[_AT[name]], place = place, place + size
        job[_ROOM] = place, scratch
        job[_COUNTS] = rows, len(self._parts), width, together
        return job

    def layer(
        self, job: Int64s, hidden: Tensor, turns: tuple[Tensor, Tensor], kv: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The output of the layer described by `job`, for `hidden [1, rows, hidden]`.

        `turns` are the rotary cosines and sines `[1, rows, dim]`. `kv` holds every sequence's keys and values `[1,
        kv_heads, capacity, dim]`; the new ones are written after its prefix.
        """
        outputs = hidden.clone(memory_format=torch.contiguous_format)
        places = [(*places_of(keys), *places_of(values)) for keys, values in kv]
        self.layers(job[None], outputs, turns, np.array(places, dtype=np.int64)[None])
        return outputs

    def layers(self, jobs: Int64s, hidden: Tensor, turns: tuple[Tensor, Tensor], places: Int64s) -> None:
        """Run `jobs [layers, ...]` one after the other, in place: `hidden [1, rows, hidden]` must be contiguous.

        `places [layers, sequences, 6]` says where each sequence's keys and values are; see `places_of`.
        """
        cosines, sines = turns[0].contiguous(), turns[1].contiguous()
        calls, table = jobs.copy(), np.empty((len(jobs), *self._table.shape), dtype=np.int64)
        table[:], table[:, :, 3:9] = self._table, places
        address = calls.ctypes.data
        calls[:, :_LAYER_FROM] = self._common
        calls[:, _AT["layers"]] = len(jobs)
        calls[:, _CALL] = 0, hidden.data_ptr(), table.ctypes.data, cosines.data_ptr(), sines.data_ptr()
        numbers = np.arange(len(jobs))
        calls[:, _AT["base"]] = address + numbers * calls.strides[0]
        calls[:, _AT["sequences"]] += numbers * table.strides[0]
        run_on_team(layers_work, address, self._threads, _kind())

    def attention(self, job: Any, queries: Tensor, attended: Tensor, places: tuple[int, ...]) -> None:
        """Compute the attention of one sequence alone; shapes are those of `layer_work.JOB`."""
        table, call = self._table.copy(), job.view(np.int64)
        table[0, 3:9], call[:_LAYER_FROM] = places, self._common
        job["queries"], job["attended"] = queries.data_ptr(), attended.data_ptr()
        job["base"], job["sequences"] = call.ctypes.data, table.ctypes.data
        run_on_team(attention_work, call.ctypes.data, self._threads, _kind())


def row_attention(query: Tensor, key: Tensor, value: Tensor, sight: Sight, scaling: float | None) -> Tensor:
    """Attention of `query [1, heads, rows, dim]` over `key/value [1, kv_heads, prefix + rows, dim]`.

    Returns `[1, rows, heads, dim]`. `sight` says which of the last `rows` keys each row sees, and from where on it sees
    the prefix. Scores and sums are float32.
    """
    (_, heads, rows, dim), kv_heads, dtype = query.shape, key.shape[1], query.dtype
    shape, scale = LayerShape(0, 0, heads, kv_heads, dim), dim**-0.5 if scaling is None else scaling
    queries = (query.float() * scale).view(kv_heads, heads // kv_heads, rows, dim).transpose(1, 2).contiguous()
    attended = torch.empty((1, rows, heads, dim))
    layers = RowLayers(shape, dtype, [Part(rows, key.shape[2] - rows, sight)])
    layers.attention(_shaped(shape, dtype), queries, attended, (*places_of(key), *places_of(value)))
    return attended.to(dtype)


def places_of(stored: Tensor) -> tuple[int, int, int]:
    """Address of keys or values `[1, heads, capacity, dim]`, and the strides in bytes of heads and rows."""
    _, by_head, by_row, _ = stored.stride()
    return stored.data_ptr(), by_head * stored.element_size(), by_row * stored.element_size()


def _buffers(shape: LayerShape, rows: int, size: int, *, quantised: int) -> dict[str, int]:
    """Bytes of each buffer between the parts of a layer."""
    wide, narrow, records = shape.heads * shape.dim, shape.kv_heads * shape.dim, rows * max(1, quantised)
    stored = {"queried": wide, "keyed": narrow, "valued": narrow, "summand": shape.hidden, "middle": shape.hidden}
    stored |= {"gates": shape.inner, "ups": shape.inner}
    inputs = {"normed": shape.hidden, "attended": wide, "gated": shape.inner}
    return {name: _lines(records * number * size) for name, number in stored.items()} | {
        "queries": _lines(4 * rows * wide),
        **{
            name: _lines(records_bytes(records, each) if quantised else 4 * rows * each)
            for name, each in inputs.items()
        },
    }


def _scratch_numbers(shape: LayerShape, width: int, together: int) -> int:
    """float32 numbers that one thread needs for its share of attention."""
    queries = together * (shape.heads // shape.kv_heads)
    return queries * (width + shape.dim + 1) + LANES + 2 * LANES * shape.dim


def _lines(size: int) -> int:
    """Bytes, rounded up to whole cache lines."""
    return -(-size // CACHE_LINE) * CACHE_LINE


def _whole(number: int) -> int:
    return -(-number // LANES) * LANES


@cache
def _kind() -> Any:
    return from_dtype(JOB)


def sight_of(masks: RowMasks, index: int) -> Sight | None:
    """What sequence `index`'s rows see; None unless each sees its path from some key on, as within a window."""
    return masks.once(("sight", index), lambda: _sight(masks, index))


def _sight(masks: RowMasks, index: int) -> Sight | None:
    (first, allowed, causal), rows = masks.visible(index), masks.forward.sequences[index]
    count, length = len(rows), rows.kv.length
    own = within(rows, masks.device).numpy()
    if allowed is None:
        return Sight(own, count) if causal or count == 1 else None
    seen = allowed.numpy()
    before = seen.shape[1] - count
    if len(seen) != count:
        return None
    if length and first == before == 0:  # nothing is hidden in the prefix
        return Sight(seen, count)
    path = np.concatenate([np.ones((count, before), dtype=np.bool_), own], axis=1)
    hidden = (path & ~np.logical_or.accumulate(seen, axis=1)).sum(axis=1)
    if not np.array_equal(hidden + seen.sum(axis=1), path.sum(axis=1)):
        return None
    skipped = first // LANES * LANES
    return Sight(own, count, skipped, (hidden + first - skipped).astype(np.int64))


def row_layers_of(masks: RowMasks, shape: LayerShape, dtype: torch.dtype, *, quantised: int = 0) -> RowLayers | None:
    """The rows of all sequences, ready for layers of this shape; None unless every sequence has a sight."""
    return masks.once((shape, dtype, quantised), lambda: _row_layers(masks, shape, dtype, quantised=quantised))


def _row_layers(masks: RowMasks, shape: LayerShape, dtype: torch.dtype, *, quantised: int) -> RowLayers | None:
    parts = []
    for index, rows in enumerate(masks.forward.sequences):
        sight = sight_of(masks, index)
        if sight is None:
            return None
        parts.append(Part(len(rows), rows.kv.length, sight))
    return RowLayers(shape, dtype, parts, quantised=quantised)
