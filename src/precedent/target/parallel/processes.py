"""The processes of one launch that hold a model together: who leads, and how the others are told what to do.

The first process (rank 0) leads: it alone runs the engine and the user's code. Messages go over a process group of
their own, which works on any device, and in which waiting costs no computation.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from precedent.errors import ConfigError, GenerationError, ModelLoadError, UnsupportedError

TIMEOUT = timedelta(minutes=5)
"""How long a forward waits for another process before it fails; loading is not bound by it."""

WHILE_IDLE = timedelta(days=365)
"""How long a process waits to be told something: nobody may have a question for days. A closed connection ends it."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_JOINED = threading.Lock()
"""Taken for good by the engine of this launch: its other processes follow that one, and nobody else, until it ends."""


@dataclass(slots=True)
class Processes:
    """All processes of a launch, seen from the one of this `rank`; `here` of the `count` share this machine.

    Messages go over the group `control`, loading ends in the group `patient`; `owned` process groups end with them.
    """

    rank: int
    count: int
    here: int
    patient: Any
    control: Any
    owned: bool
    _lost: bool = field(default=False)

    @property
    def leads(self) -> bool:
        """Whether this is the process that runs the engine."""
        return self.rank == 0

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What each does by itself, one much faster than another perhaps: wait for all of them.

        Raises what was raised here, or ModelLoadError when it failed elsewhere.
        """
        failed = torch.ones(1)
        try:
            yield
            failed.zero_()
        finally:
            dist.all_reduce(failed, group=self.patient)
        if failed:
            raise ModelLoadError("another process could not load its part of the model; see what it says")

    def say(self, message: dict[str, Any]) -> None:
        """Tell all followers. Raises RuntimeError if one is gone, or is not listening for the time of `TIMEOUT`."""
        payload = bytearray(json.dumps(message, separators=(",", ":")).encode())
        dist.broadcast(torch.tensor([len(payload)]), src=0, group=self.control)
        dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), src=0, group=self.control)

    def hear(self) -> dict[str, Any]:
        """Wait for what the leader says next. Raises RuntimeError when it is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self.control)
        payload = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self.control)
        message: dict[str, Any] = json.loads(payload.numpy().tobytes())
        return message

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all processes compute as one. If it fails here or elsewhere, nobody knows how far the others came.

        Raises GenerationError then, and at once ever after.
        """
        if self._lost:
            raise GenerationError(f"the processes that hold the model fell apart earlier: {_RESTART}")
        try:
            yield
        except Exception as error:
            self._lost = True
            raise GenerationError(
                f"one of the {self.count} processes that hold the model failed, ended or did not answer in time "
                f"({type(error).__name__}: {first_line(error)}): {_RESTART}"
            ) from error

    def leave(self) -> None:
        """Let the other processes go, if this one leads; harmless at any time."""
        if self.leads and not self._lost:
            with suppress(RuntimeError):  # they are gone already
                self.say({})
        self._lost = True
        if self.owned and dist.is_initialized():
            self.owned = False
            dist.destroy_process_group()


_RESTART = "no request can be answered any more; close the engine and start all processes again"


def join(device: str | None) -> Processes:
    """Meet the other processes that torchrun has started. Raises ConfigError, UnsupportedError or ModelLoadError.

    A process group that exists already is used as it is, with its own timeout.
    """
    place = _place(device)
    _check_launch()
    if not _JOINED.acquire(blocking=False):
        raise UnsupportedError(
            "one launch serves one tensor parallel engine, and it was loaded already: use that one, or start anew"
        )
    try:
        owned = not dist.is_initialized()
        if owned:
            _initialise(place)
        count, rank = dist.get_world_size(), dist.get_rank()
        patient = dist.new_group(backend="gloo", timeout=WHILE_IDLE)
        control = dist.new_group(backend="gloo", timeout=WHILE_IDLE if rank else TIMEOUT)
    except (RuntimeError, ValueError) as error:
        _JOINED.release()
        raise ModelLoadError(f"the processes of this launch did not find together: {first_line(error)}") from error
    return Processes(rank, count, int(os.environ.get("LOCAL_WORLD_SIZE") or count), patient, control, owned)


def first_line(error: BaseException) -> str:
    """What went wrong, without what torch appends to it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _place(device: str | None) -> str:
    """The kind of device that the processes compute on: transformers takes the accelerator wherever there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    if kind not in BACKENDS:
        raise UnsupportedError(f"tensor_parallel=True is not supported on {kind}: it takes CUDA devices or CPUs")
    if device not in (None, kind):
        raise ConfigError(
            f"tensor_parallel=True takes the {kind} devices of its processes: leave device={device!r} out"
        )
    return kind


def _check_launch() -> None:
    """Whether this is one of several processes, in the thread that can stay in this call."""
    if not dist.is_available():
        raise UnsupportedError("tensor_parallel=True needs torch.distributed, which this build of torch lacks")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "tensor_parallel=True must be loaded by the main thread: all processes but the first stay there"
        )
    environment = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    count = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if count < 2 or not (dist.is_initialized() or environment <= os.environ.keys()):
        raise ConfigError(
            "tensor_parallel=True needs several processes: start the program with "
            "`torchrun --nproc-per-node N program.py`, N being the number of devices"
        )


def _initialise(place: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    if place == "cuda":
        torch.cuda.set_device(local)
    own = torch.device("cuda", local) if place == "cuda" else None
    dist.init_process_group(BACKENDS[place], timeout=TIMEOUT, device_id=own)
