"""Every family of recurrences: over a tree it computes what its definition says, token by token, along each path."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from precedent_models.recurrent import channels, matrices
from precedent_models.recurrent.branches import (
    BEFORE,
    Branches,
    WindowStep,
    over_line,
    over_windows,
    parents_of,
    window_of,
)
from precedent_models.recurrent.states import Path, State

EXACT = 1e-9
HEADS, KEY, VALUE, CHANNELS = 3, 4, 5, 6
CPU = torch.device("cpu")


def parents(seed: int, rows: int) -> np.ndarray:
    """A random tree below one first row, as of the pending token."""
    choose = random.Random(seed)
    return np.array([BEFORE, *(choose.randrange(row) for row in range(1, rows))])


def path_to(above: np.ndarray, row: int) -> list[int]:
    path = [row]
    while above[path[0]] != BEFORE:
        path.insert(0, int(above[path[0]]))
    return path


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix_inputs(seed: int, rows: int, *, delta: bool, each_channel: bool) -> matrices.Inputs:
    decay = -numbers(seed, HEADS, rows, KEY if each_channel else 1).abs() * 0.7
    beta = numbers(seed + 1, HEADS, rows, 1).sigmoid() if delta else None
    query, key = (numbers(seed + number, HEADS, rows, KEY) for number in (2, 3))
    return matrices.Inputs(
        query, key / key.norm(dim=-1, keepdim=True), numbers(seed + 4, HEADS, rows, VALUE), decay, beta
    )


def one_by_one(inputs: matrices.Inputs, path: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: the output after the last token of a path, and the state."""
    output = torch.zeros(HEADS, VALUE, dtype=torch.float64)
    for row in path:
        query, key, value, decay = (each[:, row] for each in inputs[:4])
        state = state * decay.exp()[:, :, None]
        if inputs.beta is not None:
            value = inputs.beta[:, row] * (value - torch.einsum("hk,hkv->hv", key, state))
        state = state + key[:, :, None] * value[:, None]
        output = torch.einsum("hk,hkv->hv", query, state)
    return output, state


@pytest.mark.parametrize("state", [None, "some"])
@pytest.mark.parametrize(("delta", "each_channel"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_matrices_over_a_tree_are_those_of_every_path(
    rows: int, delta: bool, each_channel: bool, state: str | None
) -> None:
    """Outputs at every node, and the state after every path, to 1e-9 in float64."""
    inputs, above = matrix_inputs(rows, rows, delta=delta, each_channel=each_channel), parents(rows, rows)
    before: State | None = None if state is None else (numbers(9, HEADS, KEY, VALUE),)
    start = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64) if before is None else before[0]
    outputs, step = matrices.over_tree(inputs, before, Branches(rows, above, CPU))
    for row in range(rows):
        path = path_to(above, row)
        output, after = one_by_one(inputs, path, start)
        torch.testing.assert_close(outputs[:, row], output, rtol=0, atol=EXACT)
        torch.testing.assert_close(step.state_after(before, Path(path))[0], after, rtol=0, atol=EXACT)


@pytest.mark.parametrize(("delta", "each_channel"), [(False, False), (True, False), (True, True)])
def test_a_long_chain_in_chunks_is_the_chain(delta: bool, each_channel: bool) -> None:
    """A prompt is computed in chunks; it is kept whole or not at all."""
    rows = 2 * matrices.CHUNK + 5
    inputs, before = matrix_inputs(3, rows, delta=delta, each_channel=each_channel), numbers(9, HEADS, KEY, VALUE)
    outputs, step = matrices.over_tree(inputs, (before,), Branches(rows, None, CPU))
    for row in (0, matrices.CHUNK - 1, matrices.CHUNK, rows - 1):
        output, _ = one_by_one(inputs, list(range(row + 1)), before)
        torch.testing.assert_close(outputs[:, row], output, rtol=0, atol=EXACT)
    _, last = one_by_one(inputs, list(range(rows)), before)
    torch.testing.assert_close(step.state_after((before,), Path(range(rows)))[0], last, rtol=0, atol=EXACT)
    with pytest.raises(ValueError, match="whole or not at all"):
        step.state_after((before,), Path(range(rows - 1)))


def channel_inputs(family: str, rows: int) -> channels.Inputs:
    if family == "RG-LRU":
        return channels.Gated(numbers(1, rows, CHANNELS).sigmoid(), numbers(2, rows, CHANNELS))
    step = numbers(1, rows, CHANNELS).abs()
    value, (key, query) = numbers(2, rows, CHANNELS), (numbers(seed, rows, 4) for seed in (3, 4))
    return channels.Selective(value, step, key, query, -numbers(5, CHANNELS, 4).abs())


@pytest.mark.parametrize("state", [None, "some"])
@pytest.mark.parametrize("family", ["RG-LRU", "Mamba-1"])
@pytest.mark.parametrize("shape", ["tree", "short chain", "long chain"])
def test_channels_over_a_tree_are_those_of_every_path(family: str, shape: str, state: str | None) -> None:
    """Level by level is token by token, and the accepted path computed once more gives its state."""
    rows = channels.LONG + 3 if shape == "long chain" else 13
    above = parents(rows, rows) if shape == "tree" else np.arange(-1, rows - 1)
    inputs = channel_inputs(family, rows)
    size = inputs.factors()[1].shape[1:]
    start = torch.zeros(size, dtype=torch.float64) if state is None else numbers(9, *size)
    before: State | None = None if state is None else (start,)
    outputs, step = channels.over_tree(inputs, before, Branches(rows, above if shape == "tree" else None, CPU))
    for row in range(rows):
        path, found = path_to(above, row), start
        for each in path:
            kept, added = inputs.at(slice(each, each + 1)).factors()
            found = kept[0] * found + added[0]
        expected = inputs.at(slice(row, row + 1)).outputs(found[None])[0]
        torch.testing.assert_close(outputs[row], expected, rtol=0, atol=EXACT)
        if step.divisible or row == rows - 1:
            torch.testing.assert_close(step.state_after(before, Path(path))[0], found, rtol=0, atol=EXACT)


@pytest.mark.parametrize("width", [2, 4])
def test_a_convolution_over_a_tree_sees_every_rows_ancestors(width: int) -> None:
    """Each path's output is that of a chain, and its window is the path's last inputs."""
    rows, inputs, window = 11, numbers(1, CHANNELS, 11), numbers(2, CHANNELS, width - 1)
    weight, bias, above = numbers(3, CHANNELS, width), numbers(4, CHANNELS), parents(5, 11)
    windows = torch.from_numpy(Branches(rows, above, CPU).windows(width))
    outputs = over_windows(torch.cat([window, inputs], dim=1), windows, weight, bias)
    for row in range(rows):
        path = path_to(above, row)
        line = torch.cat([window, inputs[:, path]], dim=1)
        torch.testing.assert_close(outputs[:, row], over_line(line, weight, bias)[:, -1], rtol=0, atol=EXACT)
        (after,) = WindowStep(inputs, width - 1).state_after((window,), Path(path))
        torch.testing.assert_close(after, line[:, 1 - width :], rtol=0, atol=0)
    assert not window_of(None, inputs, width - 1).any()


def test_parents_are_read_from_a_mask_of_ancestors() -> None:
    """Random trees: the last ancestor before a row is its parent."""
    for seed in range(20):
        above = parents(seed, 9)
        seen = Branches(9, above, CPU).seen.numpy()
        assert parents_of(seen).tolist() == above.tolist()
        assert [sorted(np.flatnonzero(row)) for row in seen] == [sorted(path_to(above, row)) for row in range(9)]
