"""Kernels for lesser processors than this one: chosen by the environment, compiled for them, equal to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from precedent.errors import ConfigError
from precedent.runtime.instructions import FEATURES, KERNELS, features_for

TESTS = Path(__file__).parent
WIDEST = {"avx2": "ymm", "avx512": "zmm"}

SHOW_CODE = """
from numba import njit, types
from precedent_cpu.product_kernels import dot_block
from precedent_cpu.kernel_code import LANES
from precedent.runtime.instructions import native_bfloat16

block = dot_block(2, 4)

@njit([types.void(types.UniTuple(types.intp, 8), types.UniTuple(types.intp, 4))])
def run(places, fetched):
    block(False, places, fetched)

code = run.inspect_asm(run.signatures[0])
print(LANES, native_bfloat16(), *(name for name in ("zmm", "ymm", "vdpbf16ps") if name in code))
"""


def needs(kernels: str) -> None:
    try:
        features_for(kernels)
    except ConfigError:
        pytest.skip(f"this processor has no {kernels}")


def run(kernels: str, *arguments: str) -> str:
    """The output of a Python process whose kernels are limited; it must succeed."""
    environment = os.environ | {KERNELS: kernels}
    found = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, cwd=TESTS.parents[1]
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize(("kernels", "lanes"), [("avx2", 8), pytest.param("avx512", 16, marks=pytest.mark.slow)])
def test_the_compiler_uses_what_is_asked_for_and_no_more(kernels: str, lanes: int) -> None:
    """The registers in the machine code of a kernel, and whether products of many rows count on bfloat16."""
    needs(kernels)
    found = run(kernels, "-c", SHOW_CODE).split()
    assert found == [str(lanes), "False", *(name for name in ("zmm", "ymm") if name in found)]
    assert WIDEST[kernels] in found
    assert kernels == "avx512" or "zmm" not in found


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", ["avx2", "avx512"])
def test_products_are_summed_in_order_on_lesser_processors(kernels: str) -> None:
    """The shortest of the tests below that says whether a kernel is right."""
    needs(kernels)
    tests = [f"{TESTS / 'test_row_products.py'}::test_sums_keep_their_order"]
    run(kernels, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", "odd", *tests)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["avx2", "avx512"])
@pytest.mark.parametrize("file", ["row_products", "cpu_layer", "row_attention", "cpu_norm", "bitwise_families"])
def test_everything_holds_on_lesser_processors(kernels: str, file: str) -> None:
    """The tests of products, attention and layers with kernels of another width."""
    needs(kernels)
    run(kernels, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(TESTS / f"test_{file}.py"))


def test_features_of_a_lesser_processor() -> None:
    """Only what it lacks is left out."""
    needs("avx2")
    limited = features_for("avx2")
    assert limited["avx2"]
    assert not any(has for name, has in limited.items() if name.startswith(("avx512", "amx", "avxvnni")))
    assert {name for name in FEATURES if not limited[name]} >= {name for name in FEATURES if not FEATURES[name]}
    assert "+avx2" in limited.flatten().split(",")


def test_unknown_kernels_are_refused() -> None:
    """With the names that there are."""
    with pytest.raises(ConfigError, match=r"PRECEDENT_CPU_KERNELS='sse' is none of native, avx512, avxvnni, avx2"):
        features_for("sse")


def test_kernels_that_the_processor_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an illegal instruction ends the process."""
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": False})
    with pytest.raises(ConfigError, match="does not have"):
        features_for("avx2")
