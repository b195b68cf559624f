"""What every part shares: the model, the device's ceilings, a clock for asynchronous work, and the time left."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from precedent.target import Slot, TargetModel
from precedent.target.cuda.static_runner import StaticSettings

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
    "rope_theta": 500_000.0,
}
SMALL: dict[str, Any] = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class TimeIsUp(Exception):
    """The minutes that were given are over."""


@dataclass
class Setting:
    """What was asked for. `most_repeats` bounds how often a thing is timed."""

    given: argparse.Namespace
    started: float

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return torch.device(self.given.device)

    @property
    def on_cuda(self) -> bool:
        """Whether there are graphs and events."""
        return self.device.type == "cuda"

    @property
    def small(self) -> bool:
        """Whether only the program is tried, not the machine."""
        return bool(self.given.small)

    def check_time(self) -> None:
        """Raise TimeIsUp when nothing new should be begun."""
        if perf_counter() - self.started > 60.0 * self.given.minutes:
            raise TimeIsUp

    @cached_property
    def model(self) -> PreTrainedModel:
        """Random weights, bfloat16 (float32 in the small shape, so that the smoke test means something)."""
        config = AutoConfig.for_model("llama", **(SMALL if self.small else LLAMA_3_8B))
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
        torch.manual_seed(0)
        with self.device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32 if self.small else torch.bfloat16
            )
        return model.eval().requires_grad_(False)

    @cached_property
    def static(self) -> TargetModel:
        """The model in forwards of fixed size, as graphs on CUDA; the arena is full of random numbers, not zeros."""
        tokens = 8192 if self.small else None
        target = TargetModel(self.model, static=StaticSettings(arena_tokens=tokens, capture=self.on_cuda))
        for block in target.static.arena.lent:
            block.keys.normal_()
            block.values.normal_()
        return target

    @cached_property
    def plain(self) -> TargetModel:
        """The same weights, operation by operation over KV caches of their own."""
        return TargetModel(self.model)

    @cached_property
    def weight_bytes(self) -> int:
        """What a step must read of the weights: all but the embeddings, of which it reads some rows."""
        embeddings = self.model.get_input_embeddings().weight
        return sum(weight.nbytes for weight in self.model.parameters()) - embeddings.nbytes

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy on the device, reading and writing counted."""
        source = torch.randn((1 << 20 if self.small else 1 << 31) // 4, device=self.device)
        copy = torch.empty_like(source)
        return 2 * source.nbytes / (self.milliseconds(lambda: copy.copy_(source)) / 1e3)

    @cached_property
    def matrix_rate(self) -> float:
        """Floating-point operations per second of a large matrix product on random numbers."""
        size = 256 if self.small else 8192
        left, right = (torch.randn(size, size, device=self.device, dtype=self.model.dtype) for _ in range(2))
        return 2 * size**3 / (self.milliseconds(lambda: left @ right) / 1e3)

    def floor(self, length: int, sequences: int = 1) -> float:
        """Milliseconds that reading weights, keys and values once takes at least."""
        kv_bytes = self.static.kv_shape.row_bytes * length * sequences
        return (self.weight_bytes + kv_bytes) / self.bandwidth * 1e3

    def milliseconds(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Median time of a run on the device, after three that warm up (and let graphs be captured)."""
        for _ in range(3):
            run()
        self.wait()
        return median(self._times(run, 3 if self.small else repeats))

    def _times(self, run: Callable[[], object], repeats: int) -> list[float]:
        if not self.on_cuda:
            return [_milliseconds_on_cpu(run) for _ in range(repeats)]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        self.wait()
        return [begin.elapsed_time(end) for begin, end in pairs]

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def slot_of(self, target: TargetModel, length: int, room: int = 0) -> Slot:
        """A sequence of `length` tokens whose keys and values are whatever stands in its buffers."""
        slot = target.new_slot()
        with torch.inference_mode():
            slot.kv.reserve(length + room + 1)
            slot.kv.keep(range(length))
        slot.token_ids, slot.pending = [1] * length, 1
        return slot

    @property
    def machine(self) -> dict[str, Any]:
        """Where this ran."""
        name = torch.cuda.get_device_name(self.device) if self.on_cuda else "cpu"
        return {
            "device": name,
            "torch": torch.__version__,
            "shape": "small" if self.small else "llama-3-8b",
            "copy_bytes_per_second": self.bandwidth,
            "matrix_flop_per_second": self.matrix_rate,
            "weight_bytes": self.weight_bytes,
        }


def _milliseconds_on_cpu(run: Callable[[], object]) -> float:
    started = perf_counter()
    run()
    return (perf_counter() - started) * 1e3


@dataclass(frozen=True)
class Part:
    """One part of the benchmark: its name, its table's columns, and what yields its rows."""

    name: str
    title: str
    run: Callable[[Setting], Any]


def existing(path: str) -> Path:
    """A path that must be there, for argparse."""
    found = Path(path)
    if not found.exists():
        raise argparse.ArgumentTypeError(f"there is no {path}")
    return found
