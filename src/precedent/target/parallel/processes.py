"""The processes of one launch that hold a model together, and the messages between them.

The first process (rank 0) leads: only it runs the engine and the user's code. Messages use a process group of their
own, which works on any device and waits without using the processor.
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
from precedent.runtime.plain_values import first_line

TIMEOUT = timedelta(minutes=5)
"""How long a forward waits for another process before it fails; it does not limit loading."""

WHILE_IDLE = timedelta(days=365)
"""How long a process waits for a message: there may be no request for days. A closed connection ends the wait."""

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

_JOINED = threading.Lock()
"""Held by this launch's engine until the process ends: the other processes follow that engine and no other."""


@dataclass(slots=True)
class Processes:
    """All processes of a launch, as seen from the one of this `rank`; `here` of the `count` run on this machine.

    Messages use the group `control`, the end of loading the group `patient`. `owned` process groups are destroyed here.
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
        """Run a body in each process, then wait for all of them, since one may be much slower than another.

        Raises what the body raises here, or ModelLoadError if it failed in another process.
        """
        failed = torch.ones(1)
        try:
            yield
            failed.zero_()
        finally:
            dist.all_reduce(failed, group=self.patient)
        if failed:
            raise ModelLoadError("another process could not load its part of the model; see its output")

    def say(self, message: dict[str, Any]) -> None:
        """Send a message to all followers. Raises RuntimeError if one is gone or does not listen within `TIMEOUT`."""
        payload = bytearray(json.dumps(message, separators=(",", ":")).encode())
        dist.broadcast(torch.tensor([len(payload)]), src=0, group=self.control)
        dist.broadcast(torch.frombuffer(payload, dtype=torch.uint8), src=0, group=self.control)

    def hear(self) -> dict[str, Any]:
        """Wait for the leader's next message. Raises RuntimeError if the leader is gone."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self.control)
        payload = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self.control)
        message: dict[str, Any] = json.loads(payload.numpy().tobytes())
        return message

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a body that all processes compute together; a failure in any of them leaves the others' state unknown.

        Raises GenerationError then, and for every later call.
        """
        if self._lost:
            raise GenerationError(f"the processes that hold the model lost each other earlier: {_RESTART}")
        try:
            yield
        except Exception as error:
            self._lost = True
            raise GenerationError(
                f"one of the {self.count} processes that hold the model failed, ended or did not answer in time "
                f"({type(error).__name__}: {first_line(error)}): {_RESTART}"
            ) from error

    def leave(self) -> None:
        """End the other processes, if this one leads; may be called at any time."""
        if self.leads and not self._lost:
            with suppress(RuntimeError):  # they have ended already
                self.say({})
        self._lost = True
        if self.owned and dist.is_initialized():
            self.owned = False
            dist.destroy_process_group()


_RESTART = "no request can be answered any more; close the engine and start all processes again"


def join(device: str | None) -> Processes:
    """Join the other processes that torchrun has started. Raises ConfigError, UnsupportedError or ModelLoadError.

    An existing process group is used as it is, with its own timeout.
    """
    place = _place(device)
    _check_launch()
    if not _JOINED.acquire(blocking=False):
        raise UnsupportedError(
            "one launch serves one tensor-parallel engine, and it is loaded already: use that, or start a new launch"
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
        raise ModelLoadError(f"the processes of this launch could not connect: {first_line(error)}") from error
    return Processes(rank, count, int(os.environ.get("LOCAL_WORLD_SIZE") or count), patient, control, owned)


def _place(device: str | None) -> str:
    """The kind of device that the processes compute on: transformers uses the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    if kind not in BACKENDS:
        raise UnsupportedError(f"tensor_parallel=True is not supported on {kind}: it needs CUDA devices or CPUs")
    if device not in (None, kind):
        raise ConfigError(f"tensor_parallel=True uses the {kind} devices of its processes: leave device={device!r} out")
    return kind


def _check_launch() -> None:
    """Raise unless this is one of several processes, in the main thread: the others stay in this call."""
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
