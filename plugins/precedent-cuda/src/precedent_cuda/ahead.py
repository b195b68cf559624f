"""Verification on a GPU with a single read: computes every number that a walk may need before the host waits.

Counter-based random numbers are known in advance, so the token that would follow each node, if the walk ended there,
is computed as well. Sequences with the same warping (temperature, top-k, top-p, min-p) are batched, and each step reads
the numbers of all sequences at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from precedent.runtime.failures import together
from precedent.runtime.placing import placed
from precedent.sampling.coupling import noise_key
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import KeyedRng, Rng, categorical_rows
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, Candidate, CandidateTree, Sampled
from precedent.verify import Pending, walk
from precedent.verify.exact_match import exact_match
from precedent.verify.walk import NEXT, Weights
from precedent_cuda.noise import chosen
from precedent_cuda.stages import Scheduled, in_stages, schedule, weigh

LAZY = {"traversal": True, "topdown": False}
"""The rejection modes, and whether each one's tests are lazy."""

GREEDY, COUPLED = "greedy", "coupled"

MODES = (*LAZY, GREEDY, COUPLED)
"""Modes whose verdicts can be computed in advance."""

DURING_A_FORWARD = 2e-3
"""Seconds allowed for computing the masks of all nodes of a step's trees, while a GPU computes their rows."""

MOST_AT_ONCE = 1 << 24
"""Most probabilities computed in one batch: about 0.4 GB together with their cumulative sums in float64."""

COPIES = 4
"""Extra rows per sampled candidate: its distribution, and its node's residual before, during and after the test."""

log = logging.getLogger(__name__)


def verify_ahead(pending: Sequence[Pending], *, most_at_once: int = MOST_AT_ONCE) -> None:
    """Set `ahead` of those whose verdicts can be computed in advance; the host waits for the device once.

    The verdicts are the same as without it, given the same random numbers.
    """
    until, suited = perf_counter() + DURING_A_FORWARD, list[Pending]()
    for each in pending:
        if each.mode not in MODES or not isinstance(each.rng, KeyedRng):
            continue
        constrained = constrained_together(each.rows, until)
        if constrained is not None:
            each.rows = constrained
            suited.append(each)
    found = dict[Ahead, None]()
    for group in computed_alike(suited, most_at_once=most_at_once):
        # the shared `Ahead` of a group, once per member
        computed = together(group, lambda some: [Ahead(some)] * len(some), _fail)
        found |= dict.fromkeys(ahead for _, ahead in computed)
    read_together(list(found))


def _fail(pending: Pending, error: Exception) -> None:
    """Leave its verdict to be found row by row."""
    log.debug("cannot verify a tree of mode %s ahead", pending.mode, exc_info=error)


def constrained_together(rows: TargetRows, until: float) -> TargetRows | None:
    """The rows with the constraints applied to all of them, on their device and without waiting for it.

    None if that cannot be done by `until` (seconds of `perf_counter`), or if a constraint fails: the failing node may
    be one that the walk never reaches.
    """
    if rows.shape is None:
        return rows
    found: list[Tensor] = [rows.raw[0]] * len(rows.raw)
    for node in sorted(range(ROOT, len(rows.tree)), key=rows.text_before):  # so that neighbours share their prefix
        if perf_counter() > until:
            return None
        try:
            found[node + 1] = rows.logits(node)
        except Exception:
            log.debug("cannot constrain all rows, constraining those that are visited", exc_info=True)
            return None
    return TargetRows(torch.stack(found), rows.tree, rows.params, rows.output_ids)


def computed_alike(pending: Sequence[Pending], *, most_at_once: int = MOST_AT_ONCE) -> Iterator[list[Pending]]:
    """Group the trees whose rows become probabilities in the same way, at most `most_at_once` numbers per group."""
    groups: dict[object, list[Pending]] = {}
    for each in pending:
        params = each.rows.params
        warping = params.temperature, params.top_k, params.top_p, params.min_p
        groups.setdefault(None if each.mode == GREEDY else (warping, each.mode == COUPLED), []).append(each)
    for group in groups.values():
        batch, numbers = list[Pending](), 0
        for each in group:
            numbers += _num_numbers(each)
            if batch and numbers > most_at_once:
                yield batch
                batch, numbers = [], _num_numbers(each)
            batch.append(each)
        yield batch


def _num_numbers(pending: Pending) -> int:
    """How many numbers it takes: its rows, and `COPIES` more for every sampled candidate."""
    rows = pending.rows
    num_sampled = sum(isinstance(each.distribution, Sampled) for each in rows.tree.candidates)
    return (len(rows.raw) + COPIES * num_sampled) * rows.raw.shape[-1]


class KnownWeights(Weights):
    """The weights and next tokens of one tree, as numbers on the host."""

    def __init__(self, tree: CandidateTree, check: Callable[[int], None], *, lazy: bool) -> None:
        super().__init__(tree, lazy=lazy)
        self._check = check
        self._acceptance: dict[tuple[int, int], float] = {}
        self._remaining: Sequence[float] = ()
        self._tokens: Sequence[int] = ()

    def take(self, acceptance: dict[tuple[int, int], float], remaining: Sequence[float], tokens: Sequence[int]) -> None:
        """Store the w of each test by (node, ordinal), the a of the root and every node, and the token after each."""
        self._acceptance, self._remaining, self._tokens = acceptance, remaining, tokens

    def tests(self, node: int) -> tuple[Candidate, ...]:
        """The candidates tested below `node`. Raises GenerationError if its row cannot be sampled from."""
        self._check(node)  # here: a row that the walk never reaches may hold anything
        return super().tests(node)

    def acceptance(self, node: int, ordinal: int) -> float:
        """Probability w that this test below `node` accepts, given that all earlier ones rejected."""
        return self._acceptance[node, ordinal]

    def remaining(self, node: int) -> float:
        """The acceptance weight a of `node` after all tests below it have rejected."""
        return self._remaining[node + 1]

    def next_token(self, node: int, rng: Rng) -> int:
        """The token that `rng` chooses after `node`, sampled on the device."""
        self._check(node)
        return self._tokens[node + 1]


class Ahead:
    """Computes all numbers that the walks through one group of `computed_alike` may need.

    `numbers` is what the host is going to read, on the device, in float64, which holds every token id exactly.
    """

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending, self._parts = pending, list[Tensor]()
        self._tests: list[tuple[Scheduled, int]] = []
        rows, mode = [each.rows for each in pending], pending[0].mode
        self._first_rows = list(accumulate((len(each.raw) for each in rows), initial=0))
        self._first_slots = list(accumulate((len(each.tree) + 1 for each in rows), initial=0))
        logits = _joined([each.raw for each in rows])
        largest, params = logits.max(-1), rows[0].params
        if mode == COUPLED:
            keys = [key for each in rows for key in _noise_keys(each)]
            tokens = [chosen(probs_of(logits, params), keys)]
        else:
            tokens = [] if mode == GREEDY else [self._weighed(probs_of(logits, params))]
        self._by_row = len(largest) + len(tokens)
        self.numbers = torch.cat([part.double() for part in (*self._parts, *largest, *tokens)])

    def _weighed(self, probs: Tensor) -> Tensor:
        """Compute all weights; returns the token to add after each row if the walk ends there, `[rows]`."""
        found = dict[Scheduled, int]()
        for i, each in enumerate(self._pending):
            weights = KnownWeights(each.rows.tree, lambda node: None, lazy=LAZY[each.mode])
            found |= dict.fromkeys(schedule(weights, self._first_rows[i], self._first_slots[i]), i)
        tests = in_stages(list(found))
        self._tests = [(test, found[test]) for test in tests]
        self._parts = [*weigh(tests, probs, self._first_slots[-1])]
        uniforms = [each.rng.uniforms(range(ROOT, len(each.rows.tree)), NEXT) for each in self._pending]  # type: ignore[attr-defined]
        return categorical_rows(probs, placed(np.concatenate(uniforms), probs.device))

    def take(self, numbers: Sequence[float]) -> None:
        """Give each sequence its share of `numbers`, which are now on the host."""
        count = sum(part.numel() for part in self._parts)
        by_row = np.reshape(numbers[count:], (self._by_row, -1))
        for i, (each, (first, end)) in enumerate(zip(self._pending, pairwise(self._first_rows), strict=True)):
            values, ids, *tokens = by_row[:, first:end].tolist()
            tokens = list(map(int, tokens[0] if tokens else ids))
            check = partial(_check, each.rows, values)
            if each.mode in LAZY:
                weights = KnownWeights(each.rows.tree, check, lazy=LAZY[each.mode])
                acceptance = {
                    (t.node, t.ordinal): w for (t, of), w in zip(self._tests, numbers, strict=False) if of == i
                }
                remaining = numbers[len(self._tests) : count][self._first_slots[i] : self._first_slots[i + 1]]
                weights.take(acceptance, remaining, tokens)
                each.ahead = partial(walk, weights, each.rng)
            else:
                each.ahead = partial(exact_match, each.rows.tree, partial(_token_after, tokens, check))


def _check(rows: TargetRows, largest: Sequence[float], node: int) -> None:
    rows.check(largest[node + 1], node)


def _token_after(tokens: Sequence[int], check: Callable[[int], None], node: int) -> int:
    check(node)
    return tokens[node + 1]


def _noise_keys(rows: TargetRows) -> list[int]:
    """The noise keys for the root and every node, in row order."""
    assert rows.params.seed is not None
    depths = [0, *rows.tree.depths.tolist()]
    keys = [noise_key(rows.params.seed, len(rows.output_ids) + depth) for depth in range(max(depths) + 1)]
    return [keys[depth] for depth in depths]


def read_together(pending: Sequence[Ahead]) -> None:
    """Read all numbers in one copy: the only time that a step waits for the device."""
    if not pending:
        return
    numbers: list[float] = _joined([each.numbers for each in pending]).tolist()
    start = 0
    for each in pending:
        end = start + each.numbers.numel()
        each.take(numbers[start:end])
        start = end


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
