"""Checkpoints of a training run: one safetensors file, replaced atomically, so that a kill leaves the previous one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import AdamW

CHECKPOINT = "checkpoint.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class Progress:
    """The progress of a run: steps, tokens (including padding), seconds of CPU time per thread, and the next batch."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    pool: int = 0
    number: int = 0


def save(folder: Path, parameters: dict[str, Tensor], optimizer: AdamW, progress: Progress) -> None:
    """Write parameters, moments and progress to `folder`."""
    tensors = {f"parameter.{name}": one.detach().contiguous() for name, one in parameters.items()}
    for moment in MOMENTS:
        tensors |= {f"{moment}.{name}": optimizer.state[one][moment] for name, one in parameters.items()}
    partial = folder / f"{CHECKPOINT}.partial"
    save_file(tensors, partial, metadata={"progress": json.dumps(asdict(progress))})
    partial.replace(folder / CHECKPOINT)


def load(folder: Path, parameters: dict[str, Tensor], optimizer: AdamW) -> Progress:
    """Restore the checkpoint in `folder`; return a new `Progress` if there is none."""
    file = folder / CHECKPOINT
    if not file.is_file():
        return Progress()
    with safe_open(file, framework="pt") as stored, torch.no_grad():
        progress = Progress(**json.loads(stored.metadata()["progress"]))
        for name, one in parameters.items():
            one.copy_(stored.get_tensor(f"parameter.{name}"))
            moments = {moment: stored.get_tensor(f"{moment}.{name}") for moment in MOMENTS}
            optimizer.state[one] = {"step": torch.tensor(float(progress.steps)), **moments}
    return progress
