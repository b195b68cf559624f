"""Recurrences whose state is a matrix for each head: the gated delta rule, Mamba-2 and lightning attention.

With decay `a`, key `k`, query `q` and a value `u` for each token, the state `S` `[key_dim, value_dim]` and output are

    S = diag(a) S_parent + k uᵀ,    output = Sᵀ q

For Mamba-2 and lightning attention `u` is the token's value. The gated delta rule (Yang et al. 2412.06464) writes what
the state does not predict yet, `u = β (v − (diag(a) S_parent)ᵀ k)`; its decay is one number for each head, or one for
each channel of the key (Kimi Linear, 2510.26692).

No state of a node is ever computed. Unrolled, an output is a sum over the row's ancestors, and the values `u` solve a
triangular system; both are matrix products under a mask of ancestors, as in the chunked forms of the papers, where
the mask is causal. A long chain runs in such chunks, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from precedent_models.recurrent.branches import Branches
from precedent_models.recurrent.states import LayerStep, Path, State, WholeChain

CHUNK, CHANNEL_CHUNK = 64, 32
"""Tokens of a chain that are computed at once; fewer where each pair of tokens has a decay for every channel."""


class Inputs(NamedTuple):
    """Of each row: `query` and `key` `[heads, rows, key_dim]`, `value` `[heads, rows, value_dim]`.

    `decay` `[heads, rows, 1 or key_dim]` is the logarithm of what is kept of the parent's state. `beta`
    `[heads, rows, 1]` is the share of the error that the delta rule corrects; None adds values as they are.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None = None

    def at(self, rows: slice) -> Inputs:
        """The inputs of some consecutive rows."""
        return Inputs(*(None if each is None else each[:, rows] for each in self))  # type: ignore[arg-type]  # only beta


class MatrixStep(LayerStep):
    """What is kept of a forward: for each row its key, what it wrote, and the decay of all its ancestors together."""

    def state_after(self, state: State | None, path: Path) -> State:
        """`[heads, key_dim, value_dim]`, from the rows of the path alone."""
        rows = path.on(self._kept[0].device)
        return (_state_after(_matrix(state), *(each[:, rows] for each in self._kept)),)


def over_tree(inputs: Inputs, state: State | None, branches: Branches) -> tuple[Tensor, LayerStep]:
    """Outputs `[heads, rows, value_dim]` of all rows behind `state`, and what is kept of them."""
    chunk = CHUNK if inputs.decay.shape[-1] == 1 else CHANNEL_CHUNK
    if branches.is_chain and branches.count > chunk:
        return _over_chain(inputs, _matrix(state), chunk)
    output, written, decay = _masked(inputs, _matrix(state), branches.seen)
    return output, MatrixStep(inputs.key, written, decay)


def _over_chain(inputs: Inputs, state: Tensor | None, chunk: int) -> tuple[Tensor, LayerStep]:
    count, outputs = inputs.key.shape[1], []
    seen = torch.ones((chunk, chunk), dtype=torch.bool, device=inputs.key.device).tril_()
    for start in range(0, count, chunk):
        part = inputs.at(slice(start, start + chunk))
        size = part.key.shape[1]
        output, written, decay = _masked(part, state, seen[:size, :size])
        state = _state_after(state, part.key, written, decay)
        outputs.append(output)
    assert state is not None
    return torch.cat(outputs, dim=1), WholeChain(state, count)


def _masked(inputs: Inputs, state: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, what each row wrote, and the decay since `state` (as a logarithm), `[heads, rows, ...]` each."""
    query, key, value, decay, beta = inputs
    since = seen.to(decay.dtype) @ decay
    paired = _paired(since, seen)
    written = value if beta is None else _delta(inputs, state, since, paired)
    output = paired(query, key) @ written
    if state is not None:
        output += (query * since.exp()) @ state
    return output, written, since


def _delta(inputs: Inputs, state: Tensor | None, since: Tensor, paired: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What the delta rule writes at each row: its value less what the parent's state predicts, times beta."""
    _, key, value, _, beta = inputs
    assert beta is not None
    wanted = beta * (value if state is None else value - (key * since.exp()) @ state)
    if key.shape[1] == 1:
        return wanted
    written: Tensor = torch.linalg.solve_triangular(beta * paired(key, key), wanted, upper=False, unitriangular=True)
    return written


def _paired(since: Tensor, seen: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A product of two vectors for each row and ancestor, each decayed by what lies between, `[heads, rows, rows]`."""
    if since.shape[-1] == 1:
        between = (since - since.transpose(1, 2)).masked_fill(~seen, -torch.inf).exp()
        return lambda left, right: (left @ right.transpose(1, 2)) * between
    each = (since[:, :, None] - since[:, None]).masked_fill(~seen[:, :, None], -torch.inf).exp()
    return lambda left, right: ((each * right[:, None]) @ left[:, :, :, None])[..., 0]


def _state_after(state: Tensor | None, key: Tensor, written: Tensor, since: Tensor) -> Tensor:
    """The state after the last of these rows, each the parent of the next."""
    last = since[:, -1:]
    added = (key * (last - since).exp()).transpose(1, 2) @ written
    return added if state is None else added.addcmul_(state, last.exp().transpose(1, 2))


def _matrix(state: State | None) -> Tensor | None:
    return None if state is None else state[0]
