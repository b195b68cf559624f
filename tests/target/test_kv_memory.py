"""Memory of KV caches: lent again once nothing uses it, never while something does, and given back beyond a bound."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from precedent.target.kv.memory import SMALLEST, Recycler, empty

SIZE = 4 * SMALLEST


def address_of(lent: torch.Tensor) -> int:
    return lent.data_ptr()


def test_memory_is_lent_again_once_nothing_uses_it() -> None:
    recycler = Recycler()
    lent = recycler.lend(SIZE)
    address, view = address_of(lent), lent.view(torch.bfloat16)[7:9]
    del lent
    gc.collect()
    other = recycler.lend(SIZE)
    assert address_of(other) != address, "a view still uses it"
    del view
    gc.collect()
    assert recycler.spare_bytes == SIZE
    again = recycler.lend(SIZE - 100)
    assert address_of(again) == address, "of about its size"
    assert recycler.spare_bytes == 0


def test_another_size_is_new_memory() -> None:
    recycler = Recycler()
    lent = [recycler.lend(SIZE)]
    lent.clear()
    larger = recycler.lend(2 * SIZE)
    assert (larger.shape, recycler.spare_bytes) == ((2 * SIZE,), SIZE)


def test_spare_memory_is_bounded_and_the_oldest_goes_first() -> None:
    recycler = Recycler(most_spare=2 * SIZE)
    lent = [recycler.lend(SIZE) for _ in range(4)]
    addresses = [address_of(one) for one in lent]
    while lent:
        del lent[0]
    assert recycler.spare_bytes == 2 * SIZE
    again = [recycler.lend(SIZE) for _ in range(2)]
    assert [address_of(one) for one in again] == addresses[:1:-1]


def test_what_is_lent_is_never_lent_twice() -> None:
    """Eight threads write their own number and find it again."""
    recycler, wrong = Recycler(most_spare=4 * SIZE), list[int]()

    def use(number: int) -> None:
        for _ in range(200):
            lent = recycler.lend(SIZE)
            lent[::4096] = number
            if not bool((lent[::4096] == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert recycler.spare_bytes <= 4 * SIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(2, 3, 0, 4), (2, 3, 5, 4), (8, 3, 4096, 64)])
def test_shapes_and_types(size: tuple[int, ...], dtype: torch.dtype) -> None:
    found = empty(size, dtype, torch.device("cpu"))
    assert (found.shape, found.dtype, found.is_contiguous()) == (size, dtype, True)
    assert found.data_ptr() % 64 == 0
    found.fill_(1.5)
    assert bool((found == 1.5).all())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_forked_process_has_memory_of_its_own() -> None:
    lent = Recycler().lend(SIZE)
    lines = [line.split() for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    spans = {tuple(int(end, 16) for end in line[0].split("-")): line[1] for line in lines}
    (rights,) = (right for (start, end), right in spans.items() if start <= address_of(lent) < end)
    assert rights == "rw-p"
