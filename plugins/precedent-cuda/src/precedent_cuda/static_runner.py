"""Chooses a fixed size for the rows of each forward, fills its buffers and runs it, on CUDA as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.runtime.device_memory import free_bytes
from precedent.runtime.failures import OutOfMemory
from precedent.runtime.placing import placed
from precedent.target.kv.arena import KVArena
from precedent.target.kv.rows import Forward, Rows
from precedent.target.kv.shape import KVShape
from precedent.target.support import Backend
from precedent_cuda.graphs import CudaCapturer, GraphStore, Run
from precedent_cuda.ordered_attention import ordered_named
from precedent_cuda.split_attention import Variant, variant_named
from precedent_cuda.static_forward import StaticForward
from precedent_cuda.static_shape import (
    MOST_MASKED,
    StaticShape,
    most_integers,
    num_integers,
    shape_for,
    step_data,
)

ARENA_SHARE = 0.5
"""Share of the free memory for keys and values that graphs can reach; activations and other KV use the rest."""


@dataclass(frozen=True, slots=True)
class StaticSettings:
    """How forwards of fixed size are run.

    `arena_tokens` is the room for tokens of all sequences together (None: half of the free memory). Sequences that do
    not fit are computed outside the arena (with `bitwise` they are refused). `most_tokens` is an upper bound in either
    case. `attention` is "auto" or a variant of `split_attention`, with `bitwise` of `ordered_attention`.
    Without `capture` no graphs are made: so a CPU runs the same code. `max_graphs` and `max_graph_bytes` bound the
    graphs.
    """

    arena_tokens: int | None = None
    most_tokens: int | None = None
    attention: str = "auto"
    capture: bool = True
    max_graphs: int = 128
    max_graph_bytes: int = 2 * 2**30


class StaticRunner(Backend):
    """A model whose forwards have one of a few fixed sizes; `target.fixed_sizes` tests that the model supports them.

    With `every_rows`, every forward has that many rows and a row's sums do not depend on its neighbours
    (`ordered_attention`); sequences without room are refused, not computed in another way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: KVShape,
        device: torch.device,
        settings: StaticSettings,
        every_rows: int | None = None,
    ) -> None:
        tokens = settings.arena_tokens or int(ARENA_SHARE * free_bytes(device)) // shape.row_bytes
        tokens = min(tokens, settings.most_tokens or tokens)
        self.arena: KVArena = KVArena(shape, tokens)
        self._model, self._device = model, device
        self.cuda_graphs_beside = replace(settings, arena_tokens=None, most_tokens=tokens, attention="auto")
        self._every_rows = every_rows
        variants = variant_named if every_rows is None else ordered_named
        self._variant = variants(settings.attention, device, model.dtype)
        self._integers = torch.zeros(most_integers(len(self.arena.lent)), dtype=torch.long, device=device)
        self._ancestors = torch.zeros(MOST_MASKED, dtype=torch.bool, device=device)
        self.forwards = 0
        """Forwards that ran here and not in another way."""
        self.graphs: GraphStore | None = None
        if settings.capture:
            bounds = {"max_graphs": settings.max_graphs, "max_bytes": settings.max_graph_bytes}
            run = _weakly(WeakMethod(self.run))  # the store must not keep the arena alive after its engine is gone
            self.graphs = GraphStore(run, CudaCapturer(device), **bounds)

    def logits(self, forward: Forward) -> Tensor | None:
        """Logits after every row, `[rows, vocab_size]`; None if no size or arena holds them.

        Their KV caches must have room for the new rows. With `every_rows`, raises OutOfMemory instead of returning
        None.
        """
        sequences = forward.sequences
        starts = [rows.kv.starts_in(self.arena) for rows in sequences]
        found = [begins for begins in starts if begins is not None]
        shape = self.shape_for(sequences) if len(found) == len(starts) else None
        self.settled = False
        if shape is None:
            self._check_optional(sequences)
            return None
        with self._on_device():
            self._send(shape, sequences, found)
            logits = self.run(shape) if self.graphs is None else self.graphs(shape)
            self.forwards += 1
            self.settled = self.graphs is None or self.graphs.settled  # a capture takes far longer than a replay
            return logits[: sum(map(len, sequences))].clone()  # the next replay overwrites what a graph wrote

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the runner's device current, since Triton launches on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def run(self, shape: StaticShape, variant: Variant | None = None) -> Tensor:
        """The forward of a size over the buffers, operation by operation; logits `[rows, vocab_size]`.

        A given `variant` replaces the runner's own attention.
        """
        integers, ancestors = self._buffers(shape)
        forward = StaticForward(self.arena, shape, integers, ancestors, variant or self._variant)
        with forward.running():
            logits: Tensor = self._model(**forward.inputs()).logits[0]
        return logits

    def shape_for(self, sequences: Sequence[Rows]) -> StaticShape | None:
        """The size in which these rows are computed; None if none holds them."""
        return shape_for(sequences, self._every_rows)

    def _check_optional(self, sequences: Sequence[Rows]) -> None:
        """Raise OutOfMemory for rows that must not be computed in another way."""
        if self._every_rows is not None:
            longest = max(rows.kv.length + len(rows) for rows in sequences)
            raise OutOfMemory(
                f"bitwise=True: the memory set aside for keys and values has no place for {longest} tokens in one "
                "piece beside the others: ask again, for fewer max_tokens or a shorter prompt, or lower max_running of "
                "EngineLimits"
            )

    def _send(self, shape: StaticShape, sequences: Sequence[Rows], starts: Sequence[Sequence[int]]) -> None:
        integers, ancestors = step_data(shape, sequences, starts)
        for buffer, numbers in zip(self._buffers(shape), (integers, ancestors), strict=True):
            buffer.copy_(placed(numbers, self._device))

    def _buffers(self, shape: StaticShape) -> tuple[Tensor, Tensor]:
        """The parts of the buffers that this size uses: always the same memory."""
        places = shape.sequences, shape.width, shape.width
        return self._integers[: num_integers(shape, len(self.arena.lent))], self._ancestors[: prod(places)].view(places)


def _weakly(method: WeakMethod[Any]) -> Run:
    """Calls a method without keeping its object alive."""

    def run(shape: StaticShape) -> Tensor:
        found = method()
        assert found is not None, "its runner holds the graphs"
        logits: Tensor = found(shape)
        return logits

    return run
