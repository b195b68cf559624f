"""Memory of KV caches: lent again once nothing uses it, never while something does, and given back beyond a bound."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from precedent.target.kv.memory import SMALLEST, Recycler, empty

SIZE = 4 * SMALLEST


def test_memory_is_lent_again_once_nothing_uses_it_for_a_buffer_of_about_its_size() -> None:
    recycler = Recycler()
    lent = recycler.lend(SIZE)
    address, view = lent.data_ptr(), lent.view(torch.bfloat16)[7:9]
    del lent
    gc.collect()
    other = recycler.lend(SIZE)
    assert other.data_ptr() != address, "a view still uses it"
    del view
    gc.collect()
    larger = recycler.lend(2 * SIZE)
    assert (larger.shape, recycler.spare_bytes) == ((2 * SIZE,), SIZE)
    again = recycler.lend(SIZE - 100)
    assert (again.data_ptr(), recycler.spare_bytes) == (address, 0)


def test_spare_memory_is_bounded_and_the_oldest_goes_first() -> None:
    recycler = Recycler(most_spare=2 * SIZE)
    lent = [recycler.lend(SIZE) for _ in range(4)]
    addresses = [one.data_ptr() for one in lent]
    while lent:
        del lent[0]
    assert recycler.spare_bytes == 2 * SIZE
    again = [recycler.lend(SIZE) for _ in range(2)]
    assert [one.data_ptr() for one in again] == addresses[:1:-1]


def test_what_is_lent_is_never_lent_twice() -> None:
    """Eight threads write their own number and find it again."""
    recycler, wrong = Recycler(most_spare=4 * SIZE), list[int]()

    def use(number: int) -> None:
        for _ in range(100):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [(2, 3, 0, 4), (2, 3, 5, 4), (8, 3, 4096, 64)])
def test_shapes_and_types(size: tuple[int, ...], dtype: torch.dtype) -> None:
    found = empty(size, dtype, torch.device("cpu"))
    assert (found.shape, found.dtype, found.is_contiguous()) == (size, dtype, True)
    assert found.data_ptr() % 64 == 0
    assert bool((found.fill_(1.5) == 1.5).all())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_forked_process_has_memory_of_its_own() -> None:
    lent = Recycler().lend(SIZE)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, rights, *_ = line.split()
        start, end = (int(each, 16) for each in span.split("-"))
        if start <= lent.data_ptr() < end:
            assert rights == "rw-p"
