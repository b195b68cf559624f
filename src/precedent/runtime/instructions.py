"""Which of the processor's instructions compiled code uses: all of them, unless the environment asks for fewer.

`PRECEDENT_CPU_KERNELS=avx2`, `avxvnni` (AVX2 with its dot products) or `avx512` (without bfloat16 and matrix unit)
compiles for a lesser x86 processor, so that its kernels can be tested and compared on this one. torch's own operators
are not affected.
"""

from __future__ import annotations

import os

import numba
from llvmlite import binding

from precedent.errors import ConfigError

KERNELS = "PRECEDENT_CPU_KERNELS"
"""Environment variable, read when compiled code is first imported: `native`, `avx512`, `avxvnni` or `avx2`."""

_LEFT_OUT = {
    "native": (),
    "avx512": ("avx512bf16", "amx-"),
    "avxvnni": ("avx512", "avx10", "amx-"),
    "avx2": ("avx512", "avx10", "amx-", "avxvnni"),
}
"""How the names of the features begin that compiled code must not use."""


def features_for(kernels: str) -> binding.FeatureMap:
    """LLVM's features of this processor, without those that `kernels` leaves out.

    Raises ConfigError for an unknown name, and where the processor has less than was asked for.
    """
    if kernels not in _LEFT_OUT:
        raise ConfigError(f"{KERNELS}={kernels!r} is none of {', '.join(_LEFT_OUT)}")
    host = binding.get_host_cpu_features()
    if kernels != "native" and not host.get(kernels.replace("512", "512f")):
        raise ConfigError(f"{KERNELS}={kernels} asks for instructions that this processor does not have")
    left_out = _LEFT_OUT[kernels]
    return binding.FeatureMap({name: has and not name.startswith(left_out) for name, has in host.items()})


FEATURES = features_for(os.environ.get(KERNELS, "native"))
"""By LLVM's names."""


def native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself (and `PRECEDENT_CPU_KERNELS` does not leave that out)."""
    return any(FEATURES.get(name) for name in ("avx512bf16", "amx-bf16"))


def limit_compiler() -> None:
    """Let numba use no other instructions. Call it before anything is compiled."""
    if os.environ.get(KERNELS, "native") != "native":
        setattr(numba.config, "CPU_FEATURES", FEATURES.flatten())  # noqa: B010  # numba declares no types
