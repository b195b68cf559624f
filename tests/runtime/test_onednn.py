"""Products of ever new shapes take no more and more memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import ctypes, os, torch
from precedent.runtime.onednn import bound_kept_products

class Info(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

library = ctypes.CDLL("libc.so.6")
library.mallinfo2.restype = Info

def print_growth():
    weights = [torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64 * width), 8) for width in (1, 2, 3, 4)]
    used = []
    for rows in range(17, 177):
        for width, weight in enumerate(weights, start=1):
            torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 64 * width), weight, None, "none", [], "")
        used.append(library.mallinfo2().field7)
    print((used[-1] - used[40]) / 2**20, flush=True)

if (child := os.fork()) == 0:
    print_growth()
    os._exit(0)
os.waitpid(child, 0)
bound_kept_products()
print_growth()
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc for its counts")
def test_products_of_many_shapes_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    unbounded, bounded = map(float, ended.stdout.split())  # MiB in use at the end beyond those after forty shapes
    assert bounded < 4.0
    assert unbounded > 16.0, "nothing is kept any more: this bound has become useless"
