"""Loads a target model divided among several processes: `tensor_parallel=True` under torchrun.

The first process gets a `TargetModel` like any other. The others never return from `load_divided`: they follow its
forwards until it is closed, and then end.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from precedent.errors import ConfigError, UnsupportedError
from precedent.runtime.plain_values import first_line
from precedent.target.kv.cache import KVCache
from precedent.target.load.first_layers import FIRST_LAYERS
from precedent.target.load.loading import load_target
from precedent.target.load.trained_draft import holds_draft
from precedent.target.model import TargetModel
from precedent.target.parallel.mirroring import Follower, LeadingRunner, MirroredKV
from precedent.target.parallel.processes import Processes, join
from precedent.target.sharding import parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class DividedTarget(TargetModel):
    """The target in one of the processes that hold it; `kv_shape` and `kv_bytes` cover this process's heads only.

    All processes create and examine it at the same time. Raises UnsupportedError for adapters.
    """

    def __init__(self, model: PreTrainedModel, processes: Processes) -> None:
        self._processes = processes
        super().__init__(model)
        if processes.leads:
            self.runner = LeadingRunner(self.runner, processes)

    @property
    def processes_here(self) -> int:
        """How many processes on this machine store keys and values of every token."""
        return self._processes.here

    def _check_keeps(self) -> None:
        """Raise UnsupportedError: the other processes would have to keep them too."""
        raise UnsupportedError(
            "tensor_parallel=True keeps no hidden states, which mtp, eagle and block-draft read: leave that option or "
            "the drafter out"
        )

    def weights(self) -> Mapping[str, Any]:
        """The state dict, with the first process's part of divided weights."""
        return parts(super().weights())

    def close(self) -> None:
        """End the other processes; no forward is possible afterwards."""
        self._processes.leave()

    @torch.inference_mode()
    def follow(self) -> NoReturn:
        """Repeat what the first process does until it is closed, then end this process.

        Exits with status 0; if the first process is gone or a forward failed, with 1 and a line on stderr.
        """
        follower = Follower(self.runner, self.kv_shape)
        try:
            while message := self._processes.hear():
                follower.do(message)
        except Exception as error:  # there is no caller to raise to: the first process reports the failure
            log.debug("following ended", exc_info=True)
            sys.exit(_end(self._processes, error))
        self._processes.leave()
        sys.exit(0)

    def _prepare(self) -> None:
        """Leave every layer as it is: kernels that read weights in place do not support a part of them."""
        if getattr(self.model, "_hf_peft_config_loaded", False):
            raise UnsupportedError("tensor_parallel=True does not support adapters: merge them into the weights")

    def _empty_cache(self) -> KVCache:
        runner = self.runner
        assert isinstance(runner, LeadingRunner), "followers create the caches that the leader announces"
        return MirroredKV.new(self.kv_shape, runner.journal)


@contextmanager
def load_divided(
    name_or_path: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[tuple[DividedTarget, PreTrainedTokenizerBase]]:
    """Load this process's part of a model, and its tokenizer, for the body of a `with`; runs it in the first process.

    The others follow it, and end when the target is closed or the body raises. Raises what `load_target` raises,
    ConfigError without torchrun, and UnsupportedError for a model that cannot be divided.
    """
    processes = join(device)
    settings: dict[str, Any] = {"dtype": dtype, "model_kwargs": model_kwargs, "num_processes": processes.count}
    try:
        with processes.all_or_none():
            model, tokenizer = load_target(name_or_path, **settings)
        target = DividedTarget(model, processes)
    except Exception as error:
        if processes.leads:
            processes.leave()
            raise
        sys.exit(_end(processes, error))
    if not processes.leads:
        target.follow()
    try:
        yield target, tokenizer
    except BaseException:
        target.close()
        raise


def check_beside(target: object, draft_model: object, *, bitwise: bool, cuda_graphs: bool, keep_prefixes: bool) -> None:
    """Raise ConfigError or UnsupportedError for options that a divided target excludes, before anything is loaded."""
    if not isinstance(target, str | Path):
        raise ConfigError("tensor_parallel=True needs a name or folder: each process reads its part of the weights")
    if bitwise:
        raise UnsupportedError(
            "bitwise=True does not work with tensor_parallel=True: the order in which the processes' parts are summed "
            "is not under our control; leave one of them out"
        )
    if cuda_graphs:
        raise UnsupportedError(
            "cuda_graphs=True does not work with tensor_parallel=True: a graph would hold the processes' messages; "
            "leave one of them out"
        )
    if keep_prefixes:
        raise UnsupportedError(
            "keep_prefixes=True does not work with tensor_parallel=True: each process has the keys and values of its "
            "own heads alone; leave one of them out"
        )
    if isinstance(draft_model, str | Path) and (str(draft_model).startswith(FIRST_LAYERS) or holds_draft(draft_model)):
        raise UnsupportedError(
            f"the draft model {draft_model} computes with weights of the target, which tensor_parallel=True divides "
            "among processes: give a complete draft model, or none"
        )


def _end(processes: Processes, error: Exception) -> str:
    return f"precedent: process {processes.rank} of {processes.count} ends: {type(error).__name__}: {first_line(error)}"
