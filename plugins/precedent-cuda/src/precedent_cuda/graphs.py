"""Captures forwards of fixed size as CUDA graphs, and keeps the graphs bounded in number and in memory.

Launching some hundreds of small kernels takes the host about as long as a step of a small model takes the GPU; a graph
launches them all at once. A size is captured when it comes for the second time. A size that cannot be captured runs
without a graph, and the log says so once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precedent.runtime.process import Lock
from precedent_cuda.static_forward import StaticShape

log = logging.getLogger(__name__)

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
    """Runs forwards, by graph from the second time a size comes; a new graph replaces the least recently used one.

    Graphs share their memory, so it can be released only when all of them go. That happens when together they took more
    than `max_bytes`.
    """

    def __init__(self, run: Run, capturer: CudaCapturer, *, max_graphs: int, max_bytes: int) -> None:
        self._run, self._capturer = run, capturer
        self._max_graphs, self._max_bytes = max_graphs, max_bytes
        self._graphs: OrderedDict[StaticShape, CapturedGraph] = OrderedDict()
        self._seen: set[StaticShape] = set()
        self._without: set[StaticShape] = set()
        self._nbytes = 0
        self.settled = False
        """Whether the last forward ran as its size will from now on: replayed, or for good without a graph."""

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, shape: StaticShape) -> Tensor:
        """The logits of this size over the contents of the buffers, `[rows, vocab_size]`."""
        self.settled = shape in self._graphs or shape in self._without
        replay = self._graphs[shape] if shape in self._graphs else self._captured(shape)
        if replay is None:
            return self._run(shape)
        self._graphs.move_to_end(shape)
        return replay()

    def _captured(self, shape: StaticShape) -> CapturedGraph | None:
        """A new graph; None for a size that came for the first time or cannot be captured."""
        if shape in self._without or shape not in self._seen:
            self._seen.add(shape)
            return None
        self._make_room()
        try:
            self._graphs[shape] = self._capturer.capture(self._run, shape)
        except Exception as error:  # out of memory, a forbidden operation, Triton's own: a plain run will show it
            log.warning("no CUDA graph for %s, it runs without one: %s", shape, next(iter(str(error).splitlines()), ""))
            self._without.add(shape)
            return None
        nbytes = self._graphs[shape].nbytes
        self._nbytes += nbytes
        if self._nbytes > self._max_bytes:
            self._start_over(shape, nbytes)
        return self._graphs.get(shape)

    def _make_room(self) -> None:
        """Drop the least recently used graph if there are too many; its size is captured again after two more runs."""
        if len(self._graphs) < self._max_graphs:
            return
        self._seen.discard(self._graphs.popitem(last=False)[0])
        if not self._graphs:  # the last graph is gone, and with it the shared memory
            self._nbytes = 0
            self._capturer.forget()

    def _start_over(self, shape: StaticShape, nbytes: int) -> None:
        """Drop all graphs; a size that takes too much by itself is never captured again."""
        log.info("CUDA graphs took %.0f MB: all are dropped and captured again", self._nbytes / 1e6)
        if nbytes > self._max_bytes:
            self._without.add(shape)
        self._graphs.clear()
        self._nbytes = 0
        self._capturer.forget()
