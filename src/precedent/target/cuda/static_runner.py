"""Runs forwards in fixed sizes (`static_forward`), on CUDA as graphs, and says which models cannot be run so."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.runtime.device_memory import free_bytes
from precedent.runtime.failures import OutOfMemory
from precedent.runtime.placing import placed
from precedent.target.cuda.graphs import CudaCapturer, GraphStore, Run
from precedent.target.cuda.host_waits import HostWaits
from precedent.target.cuda.ordered_attention import ordered_named
from precedent.target.cuda.split_attention import Variant, split, variant_named
from precedent.target.cuda.static_forward import StaticForward
from precedent.target.cuda.static_shape import (
    MOST_MASKED,
    StaticShape,
    most_integers,
    num_integers,
    shape_for,
    step_data,
)
from precedent.target.examine import TEXT, observe, tolerance, tree_error
from precedent.target.kv.arena import KVArena
from precedent.target.kv.cache import KVCache
from precedent.target.kv.packing import Rows, chain_rows
from precedent.target.kv.shape import KVShape
from precedent.target.runner import Runner
from precedent.target.support import FULL_ATTENTION, attention_kinds

ARENA_SHARE = 0.5
"""Of the free memory, for keys and values that graphs can reach; the rest is for activations, and for other ones."""


@dataclass(frozen=True, slots=True)
class StaticSettings:
    """How forwards of fixed size are run.

    `arena_tokens` is the room for tokens of all sequences together (None: half of the memory that is free); what does
    not fit is computed without (with `bitwise` it is refused); `most_tokens` bounds either. `attention` is "auto" or a
    variant of `split_attention`, with `bitwise` of `ordered_attention`.
    Without `capture` no graphs are made, which is how a CPU runs the same code; `max_graphs` and `max_graph_bytes`
    bound them.
    """

    arena_tokens: int | None = None
    most_tokens: int | None = None
    attention: str = "auto"
    capture: bool = True
    max_graphs: int = 128
    max_graph_bytes: int = 2 * 2**30


class StaticRunner:
    """A model whose forwards have one of a few fixed sizes; made by `static_runner`, which checks that they can.

    With `every_rows` they all have so many rows, a row's sums do not depend on its neighbours (`ordered_attention`),
    and what finds no room is refused, not computed otherwise.
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
        self.arena, self._model, self._device = KVArena(shape, tokens), model, device
        self.settings_beside = replace(settings, arena_tokens=None, most_tokens=tokens, attention="auto")
        """How a draft model runs beside it, with room for as many tokens at most."""
        self._every_rows = every_rows
        variants = variant_named if every_rows is None else ordered_named
        self._variant = variants(settings.attention, device, model.dtype)
        self._integers = torch.zeros(most_integers(len(self.arena.lent)), dtype=torch.long, device=device)
        self._ancestors = torch.zeros(MOST_MASKED, dtype=torch.bool, device=device)
        self.forwards = 0
        """Forwards that ran here and not otherwise."""
        self.graphs: GraphStore | None = None
        if settings.capture:
            bounds = {"max_graphs": settings.max_graphs, "max_bytes": settings.max_graph_bytes}
            run = _weakly(WeakMethod(self.run))  # the store must not hold the arena: engines come and go
            self.graphs = GraphStore(run, CudaCapturer(device), **bounds)

    def logits(self, sequences: Sequence[Rows]) -> list[Tensor] | None:
        """Logits after every row, `[rows, vocab_size]` for each sequence; None if they fit in no size, or in no arena.

        Their KV caches must have room for the new rows. With `every_rows` OutOfMemory is raised instead of None.
        """
        starts = [rows.kv.starts_in(self.arena) for rows in sequences]
        found = [begins for begins in starts if begins is not None]
        shape = self.shape_for(sequences) if len(found) == len(starts) else None
        if shape is None:
            self._check_optional(sequences)
            return None
        ends = pairwise(accumulate((len(rows) for rows in sequences), initial=0))
        with self._on_device():
            self._send(shape, sequences, found)
            logits = self.run(shape) if self.graphs is None else self.graphs(shape)
            self.forwards += 1
            logits = logits[: sum(map(len, sequences))].clone()  # the next replay overwrites what a graph wrote
            return [logits[start:stop] for start, stop in ends]

    def _on_device(self) -> AbstractContextManager[object]:
        """Triton launches on whichever device is the current one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def run(self, shape: StaticShape, variant: Variant | None = None) -> Tensor:
        """The forward of a size over what stands in the buffers, operation by operation, `[rows, vocab_size]`.

        With another `variant` of attention than its own, if one is given.
        """
        integers, ancestors = self._buffers(shape)
        forward = StaticForward(self.arena, shape, integers, ancestors, variant or self._variant)
        with forward.running():
            logits: Tensor = self._model(**forward.inputs()).logits[0]
        return logits

    def shape_for(self, sequences: Sequence[Rows]) -> StaticShape | None:
        """The size that these rows are computed in, None where they fit in none."""
        return shape_for(sequences, self._every_rows)

    def _check_optional(self, sequences: Sequence[Rows]) -> None:
        """Raise OutOfMemory for rows that nobody else may compute."""
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
        """The parts of the buffers that this size uses: the same memory every time."""
        places = shape.sequences, shape.width, shape.width
        return self._integers[: num_integers(shape, len(self.arena.lent))], self._ancestors[: prod(places)].view(places)


def static_runner(runner: Runner, shape: KVShape, settings: StaticSettings) -> StaticRunner:
    """Let `runner` compute in fixed sizes where they fit, once that is seen to be right; returns what does it.

    Raises UnsupportedError, naming the model and what hinders.
    """
    static = fitted(runner, shape, settings)
    if isinstance(static, str):
        name = runner.model.config.get_text_config().model_type
        raise UnsupportedError(f"{name} cannot run as CUDA graphs: {static}; give it without cuda_graphs")
    return static


def fitted(
    runner: Runner, shape: KVShape, settings: StaticSettings, every_rows: int | None = None
) -> StaticRunner | str:
    """What computes for `runner` from now on, or the reason why it cannot."""
    reason = hindrance(runner, settings)
    if reason is not None:
        return reason
    static = StaticRunner(runner.model, shape, runner.device, settings, every_rows)
    runner.static = static
    try:
        reason = _disproof(runner, static)
    except (UnsupportedError, OutOfMemory) as error:
        reason = str(error)
    except Exception as misfit:  # what models raise, and what compilers do
        reason = f"{type(misfit).__name__}: {misfit}".splitlines()[0]
    if reason is not None:
        runner.static = None
    return reason or static


def hindrance(runner: Runner, settings: StaticSettings) -> str | None:
    """Why a model cannot run in fixed sizes, as far as can be said without running it."""
    others = sorted(attention_kinds(runner.model.config.get_text_config()) - {FULL_ATTENTION})
    devices = {parameter.device for parameter in runner.model.parameters()}
    if settings.capture and runner.device.type != "cuda":
        return f"there are CUDA graphs on CUDA devices only, and it is on {runner.device.type}"
    if not runner.packed:
        return "its attention does not go through transformers' attention interface"
    if others:
        return f"its {', '.join(others)} layers do not see the whole prefix"
    if devices != {runner.device}:
        return "its layers are spread over several devices, or offloaded"
    return None


@torch.inference_mode()
def _disproof(runner: Runner, static: StaticRunner) -> str | None:
    """What is wrong with forwards that were computed; None if nothing is.

    They are compared thrice: the second time a size comes it is captured, the third time only replayed.
    """
    kv = KVCache(static.arena.shape, static.arena)
    kv.reserve(1)
    alone = [chain_rows(kv, TEXT[:1])]
    shape, _ = static.shape_for(alone), static.logits(alone)
    assert shape is not None
    with HostWaits() as waits:
        static.run(shape, split)  # compiled attention cannot be looked into; it is the model that is in question
    if waits.names:  # found before anything is captured: what waits cannot be
        return f"its forward makes the host wait ({waits.reasons})"
    _, expected = observe(runner)
    for _ in range(3):
        before, error = static.forwards, tree_error(runner, lambda: KVCache(static.arena.shape, static.arena), expected)
        if static.forwards != before + 2:
            return "arena_tokens leaves no room for two sequences"
        if error > tolerance(runner.model):
            return f"a scored tree is {error:.2g} off"
    return None


def _weakly(method: WeakMethod[Any]) -> Run:
    """Calls the method of an object that it does not keep."""

    def run(shape: StaticShape) -> Tensor:
        found = method()
        assert found is not None, "its runner holds the graphs"
        logits: Tensor = found(shape)
        return logits

    return run
