"""Weights of drafts in eight bits: in the files that training writes, and in memory beside a quantised target."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from precedent.target.quantised import QuantisedWeight, Rows
from precedent_cpu.codes import Band, CodedWeight, Layout, codes_of, layout_of
from precedent_cpu.quantised_linear import QuantisedLinear

LAYOUT, SCALE = Layout(8, 32, offset=128), "_scale"
"""How weights of drafts are quantised, and what the name of a weight's scales adds to its own in a draft's file."""


class DraftWeight(CodedWeight):
    """Signed codes `[outputs, inputs]` in memory, and a float16 scale for each 32 inputs."""

    kind, layout = "int8", LAYOUT

    def __init__(self, name: str, codes: Tensor, scales: Tensor) -> None:
        self.name, self._codes, self._scales = name, codes.numpy(), scales.numpy()
        self.out_features, self.in_features = codes.shape

    def rows(self, which: Rows) -> Band:
        """The codes of some outputs, with their scales."""
        return Band(self._codes[which].view(np.uint8) ^ np.uint8(128), self._scales[which].astype(np.float32))

    @property
    def stored(self) -> NDArray[np.int8]:
        """The codes."""
        return self._codes


class SomeRows(CodedWeight):
    """Some outputs of another quantised weight."""

    def __init__(self, whole: QuantisedWeight, ids: NDArray[np.int64]) -> None:
        layout = layout_of(whole)
        assert layout is not None
        self.name, self.kind, self.layout = whole.name, whole.kind, layout
        self.order = whole.order if isinstance(whole, CodedWeight) else None
        self.out_features, self.in_features = len(ids), whole.in_features
        self._whole, self._ids = whole, ids

    def rows(self, which: Rows) -> Band:
        """The codes of some of these outputs."""
        return codes_of(self._whole, self._ids[which])

    @property
    def stored(self) -> NDArray[np.int64]:
        """The numbers of the outputs."""
        return self._ids


def packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the matrices of linear layers in eight bits, and scales under names of their own."""
    found = dict[str, Tensor]()
    for name, weight in weights.items():
        if not name.endswith("_proj.weight") or weight.shape[1] % LAYOUT.group:
            found[name] = weight
            continue
        groups = weight.detach().cpu().float().unflatten(1, (-1, LAYOUT.group))
        scales = (groups.abs().amax(-1) / 127).half()
        codes = (groups / scales.float().clamp(min=1e-30)[..., None]).round().clamp(-127, 127)
        found |= {name: codes.flatten(1).to(torch.int8), f"{name}{SCALE}": scales}
    return found


def unpacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `packed` was given, up to rounding."""
    found = {name: weight for name, weight in weights.items() if not name.endswith(SCALE)}
    for name in [name for name in found if f"{name}{SCALE}" in weights]:
        groups = found[name].float().unflatten(1, (-1, LAYOUT.group)) * weights[f"{name}{SCALE}"].float()[..., None]
        found[name] = groups.flatten(1)
    return found


def quantise_linears(module: nn.Module) -> None:
    """Let the linear layers in a module compute with eight bits, exactly those of a file that holds them `packed`."""
    for name, child in list(module.named_modules()):
        parts = packed({f"{name}.weight": child.weight}) if isinstance(child, nn.Linear) else {}
        if f"{name}.weight{SCALE}" in parts:
            weight = DraftWeight(name, parts[f"{name}.weight"], parts[f"{name}.weight{SCALE}"])
            module.set_submodule(name, QuantisedLinear(weight, child.bias))
