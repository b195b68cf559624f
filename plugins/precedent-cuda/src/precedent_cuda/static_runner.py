"""Runs a model in forwards of fixed size, on CUDA as graphs; a test at load shows that the model can."""

from __future__ import annotations

from contextlib import nullcontext
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.runtime.device_memory import free_bytes
from precedent.runtime.failures import OutOfMemory
from precedent.runtime.placing import placed
from precedent.target.examine import TEXT, observe, tolerance, tree_error
from precedent.target.kv.cache import KVCache
from precedent.target.kv.layer_kinds import FULL_ATTENTION, attention_kinds
from precedent.target.kv.rows import ForwardPass, chain_rows
from precedent.target.kv.shape import KVShape
from precedent.target.runner import Runner
from precedent.target.support import Backend
from precedent_cuda import StaticSettings
from precedent_cuda.arena import KVArena
from precedent_cuda.graphs import CudaCapturer, GraphStore
from precedent_cuda.host_waits import HostWaits
from precedent_cuda.static_forward import StaticForward, StaticShape, shape_for, step_numbers

ARENA_SHARE = 0.5
"""Share of the free memory for keys and values that graphs can reach; activations and other KV use the rest."""


class StaticRunner(Backend):
    """A model whose forwards have one of a few fixed sizes; made by `fixed_sizes`.

    With `every_rows`, every forward has that many rows, so that a row's sums do not depend on its neighbours; sequences
    without room are refused, not computed in another way.
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
        self.arena: KVArena = KVArena(shape, tokens)
        self.cuda_graphs_beside = StaticSettings(tokens, settings.capture)
        self._model, self._device, self._every_rows = model, device, every_rows
        self._buffers: dict[StaticShape, dict[str, Tensor]] = {}
        self.forwards = 0
        """Forwards that ran here and not in another way."""
        self.graphs: GraphStore | None = None
        if settings.capture:
            weakly = WeakMethod(self.run)  # the store must not keep the arena alive after its engine is gone

            def run(size: StaticShape) -> Tensor:
                found = weakly()
                assert found is not None, "this runner holds the graphs"
                return found(size)

            self.graphs = GraphStore(run, CudaCapturer(device))

    def logits(self, forward: ForwardPass) -> Tensor | None:
        """Logits after every row, `[rows, vocab_size]`; None if no size or arena holds them.

        Their KV caches must have room for the new rows. With `every_rows`, raises OutOfMemory instead of returning
        None.
        """
        sequences = forward.sequences
        starts = [begins for rows in sequences if (begins := self.arena.starts(rows.kv)) is not None]
        shape = shape_for(sequences, self._every_rows) if len(starts) == len(sequences) else None
        self.settled = False
        if shape is None and self._every_rows is None:
            return None
        if shape is None:  # computed in another way, these rows would round differently
            longest = max(rows.kv.length + len(rows) for rows in sequences)
            raise OutOfMemory(
                f"bitwise=True: the memory set aside for keys and values has no place for {longest} tokens in one "
                "piece beside the others: ask again, for fewer max_tokens or a shorter prompt, or lower max_running of "
                "EngineLimits"
            )
        numbers = {name: placed(one, self._device) for name, one in step_numbers(shape, sequences, starts).items()}
        buffers = self._buffers.setdefault(shape, {name: torch.empty_like(one) for name, one in numbers.items()})
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with on_device:  # Triton launches on the current device
            for name, one in numbers.items():
                buffers[name].copy_(one)
            logits = self.run(shape) if self.graphs is None else self.graphs(shape)
            self.forwards += 1
            self.settled = self.graphs is None or self.graphs.settled  # a capture takes far longer than a replay
            return logits[: forward.spans[-1][1]].clone()  # the next replay overwrites what a graph wrote

    def run(self, shape: StaticShape) -> Tensor:
        """The forward of a size over its buffers, operation by operation; logits `[rows, vocab_size]`."""
        forward = StaticForward(self.arena, shape, self._buffers[shape])
        with forward.running():
            logits: Tensor = self._model(**forward.inputs()).logits[0]
        return logits


class Hindrance(Exception):
    """Why a model cannot run in fixed sizes, in words that follow "it cannot: "."""


def fixed_sizes(
    runner: Runner, shape: KVShape, settings: StaticSettings, every_rows: int | None = None
) -> StaticRunner:
    """Return a static runner for the model of `runner`, once a test has passed.

    Raises Hindrance for a model that cannot run in fixed sizes.
    """
    _check_settings(runner, settings)
    if None in shape.layers:
        raise Hindrance("some of its layers have no keys and values of their own")
    try:
        static = StaticRunner(runner.model, shape, runner.device, settings, every_rows)
        with runner.using(static):
            _prove(runner, static)
    except Hindrance:
        raise
    except (UnsupportedError, OutOfMemory) as error:
        raise Hindrance(str(error)) from error
    except Exception as misfit:  # what models raise, and what compilers do
        raise Hindrance(f"{type(misfit).__name__}: {misfit}".splitlines()[0]) from misfit
    return static


def _check_settings(runner: Runner, settings: StaticSettings) -> None:
    """Raise Hindrance for what can be known without running the model."""
    others = sorted(attention_kinds(runner.model.config.get_text_config()) - {FULL_ATTENTION})
    devices = {parameter.device for parameter in runner.model.parameters()}
    if settings.capture and runner.device.type != "cuda":
        raise Hindrance(f"CUDA graphs need CUDA devices, and it is on {runner.device.type}")
    if runner.layer_state.why_irregular is not None:
        raise Hindrance(runner.layer_state.why_irregular)
    if not runner.packed:
        raise Hindrance("its attention does not go through transformers' attention interface")
    if others:
        raise Hindrance(f"its {', '.join(others)} layers do not see the whole prefix")
    if devices != {runner.device}:
        raise Hindrance("its layers are spread over several devices, or offloaded")


@torch.inference_mode()
def _prove(runner: Runner, static: StaticRunner) -> None:
    """Raise Hindrance if forwards of fixed size compute wrong results.

    Each size is compared three times: it is captured at the second run and only replayed at the third.
    """
    kv = KVCache(static.arena.shape, static.arena)
    kv.reserve(1)
    with HostWaits() as waits:
        static.logits(ForwardPass([chain_rows(kv, TEXT[:1])]))
    if waits.names:  # checked before any capture: a forward that waits cannot be captured
        raise Hindrance(f"its forward makes the host wait ({', '.join(sorted(set(waits.names)))})")
    _, expected = observe(runner)
    for _ in range(3):
        before, error = static.forwards, tree_error(runner, lambda: KVCache(static.arena.shape, static.arena), expected)
        if static.forwards != before + 2:
            raise Hindrance("arena_tokens leaves no room for two sequences")
        if error > tolerance(runner.model, runner.layer_state):
            raise Hindrance(f"a scored tree is {error:.2g} off")
