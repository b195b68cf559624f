"""Captures forwards of fixed size as CUDA graphs.

Launching some hundreds of small kernels takes the host about as long as a step of a small model takes the GPU; a graph
launches them all at once. A size is captured when it comes for the second time. A size that cannot be captured runs
without a graph, and the log says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precedent.runtime.process import Lock
from precedent_cuda.static_forward import StaticShape

log = logging.getLogger(__name__)

MOST_GRAPHS, MOST_BYTES = 128, 2 * 2**30
"""Beyond these all graphs are dropped: they share their memory, which can be released only when all of them go."""

_ONE_AT_A_TIME = Lock()

Run = Callable[[StaticShape], Tensor]
"""Runs the forward of a size over the contents of the buffers; returns its logits `[rows, vocab_size]`."""


@dataclass(frozen=True)
class CapturedGraph:
    """A graph, the logits that its replays overwrite, and the memory that it took beyond earlier ones."""

    graph: Any
    logits: Tensor
    nbytes: int

    def __call__(self) -> Tensor:
        """Launch it without waiting; the logits `[rows, vocab_size]` are valid until the next replay of any graph."""
        self.graph.replay()
        return self.logits


class CudaCapturer:
    """Captures on one CUDA device; all graphs share one memory pool.

    Target and draft model may run on two threads, so the whole process makes one capture at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device)  # one for all graphs: libraries keep memory for each stream
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Run, shape: StaticShape) -> CapturedGraph:
        """Run once on a side stream, where libraries choose and load their kernels, then capture.

        Other threads may keep using CUDA meanwhile. Raises RuntimeError if an operation cannot be captured.
        """
        with _ONE_AT_A_TIME, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            self._beside.wait_stream(current)
            try:
                try:
                    with torch.cuda.stream(self._beside):
                        run(shape)
                finally:
                    current.wait_stream(self._beside)
                torch.cuda.empty_cache()  # as a capture does when it begins: cached memory must not count against it
                before = torch.cuda.memory_reserved(self._device)
                graph: Any = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._pool, stream=self._beside, capture_error_mode="thread_local"):
                    logits = run(shape)
                return CapturedGraph(graph, logits, max(0, torch.cuda.memory_reserved(self._device) - before))
            finally:
                torch.cuda.set_stream(current)  # a failed capture leaves its own stream current

    def forget(self) -> None:
        """Start a new memory pool and release the old one."""
        with _ONE_AT_A_TIME:
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()


class GraphStore:
    """Runs forwards, by graph from the second time a size comes; `capturer` makes the graphs."""

    def __init__(self, run: Run, capturer: CudaCapturer) -> None:
        self._run, self._capturer = run, capturer
        self._seen: set[StaticShape] = set()
        self._graphs: dict[StaticShape, CapturedGraph | None] = {}
        self.settled = False
        """Whether the last forward ran as its size will from now on: replayed, or for good without a graph."""

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, shape: StaticShape) -> Tensor:
        """The logits of this size over the contents of the buffers, `[rows, vocab_size]`."""
        self.settled = shape in self._graphs
        if shape in self._seen and not self.settled:
            self._make_room()
            self._graphs[shape] = self._captured(shape)
        self._seen.add(shape)
        graph = self._graphs.get(shape)
        return self._run(shape) if graph is None else graph()

    def _captured(self, shape: StaticShape) -> CapturedGraph | None:
        try:
            return self._capturer.capture(self._run, shape)
        except Exception as error:  # out of memory, a forbidden operation, Triton's own: a plain run will show it
            log.warning("no CUDA graph for %s, it runs without one: %s", shape, next(iter(str(error).splitlines()), ""))
            return None

    def _make_room(self) -> None:
        nbytes = sum(graph.nbytes for graph in self._graphs.values() if graph is not None)
        if len(self) >= MOST_GRAPHS or nbytes > MOST_BYTES:
            log.info("%d CUDA graphs took %.0f MB: all are dropped and captured again", len(self), nbytes / 1e6)
            self._graphs = {shape: graph for shape, graph in self._graphs.items() if graph is None}
            self._capturer.forget()
