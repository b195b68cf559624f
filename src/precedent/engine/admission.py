"""Admission: reserves memory for a request's whole answer before it starts, so that no request can starve another."""

from __future__ import annotations

from collections.abc import Callable

import torch

from precedent.config import EngineLimits
from precedent.engine.kept_prefixes import KeptPrefixes
from precedent.engine.queued_sequence import QueuedSequence
from precedent.errors import CapacityError
from precedent.runtime.device_memory import free_bytes
from precedent.target import Slot, Target
from precedent.target.prefix_pool import PrefixPool

SHARE_ON_CPU, SHARE_ON_ACCELERATORS = 0.5, 0.8
"""Shares of the memory free at engine start that keys and values may take; on a CPU, other programs need some too."""


class Admission:
    """Accounts for the memory of keys and values: `reserved_bytes` for admitted requests, the rest for idle slots.

    A reservation covers prompt, answer and the largest tree. Idle conversations are evicted first, oldest first. If
    keys and values must be in an arena (`Target.tokens_in_arena`), a request also waits until the arena has a
    contiguous place for all of its own, and takes it when it starts. Without a limit, keys and values may take a share
    of the `free` bytes of the target's device.
    """

    def __init__(
        self,
        target: Target,
        limits: EngineLimits,
        kept: KeptPrefixes | None = None,
        *,
        free: Callable[[torch.device], int] = free_bytes,
    ) -> None:
        self.max_running = limits.max_running
        self.max_kv_bytes = limits.max_kv_bytes or _default_bytes(target, free)
        if target.capabilities.fixed_memory:
            self.max_kv_bytes = min(self.max_kv_bytes, target.arena_bytes)
        self.reserved_bytes = self.num_inside = self._num_unplaced = 0
        self.idle_bytes = 0
        self._target, self._kept = target, kept
        self._pool = PrefixPool(target, limits.max_idle_kv_bytes, kept)

    def check(self, num_bytes: int, prompt_tokens: int, max_tokens: int) -> None:
        """Raise CapacityError for a request that does not fit even alone."""
        if num_bytes > self.max_kv_bytes:
            raise CapacityError(
                f"the request needs {_mebibytes(num_bytes)} of keys and values ({prompt_tokens} prompt tokens, "
                f"max_tokens={max_tokens}, and its largest tree), the engine may hold {_mebibytes(self.max_kv_bytes)}: "
                "ask for fewer max_tokens or a shorter prompt, or raise max_kv_bytes of EngineLimits"
            )

    def admits(self, sequence: QueuedSequence) -> bool:
        """Whether the request fits beside the admitted ones; alone it always does, because `check` passed.

        An arena has no place for it until earlier requests have taken theirs.
        """
        if self.num_inside == 0:
            return True
        if self.num_inside >= self.max_running or self.reserved_bytes + sequence.kv_bytes > self.max_kv_bytes:
            return False
        rows = self._rows_in_place(sequence)
        return not rows or (not self._num_unplaced and self._clear(rows))

    def enter(self, sequence: QueuedSequence) -> None:
        """Reserve the request's memory."""
        self.num_inside += 1
        self._num_unplaced += 1
        self.reserved_bytes += sequence.kv_bytes

    def slot_for(self, sequence: QueuedSequence) -> Slot:
        """Take the slot that holds most of the prompt; evicts idle conversations to make room for its growth."""
        rows = self._rows_in_place(sequence)
        self._clear(rows)
        slot = self._pool.acquire(sequence.request.tenant, sequence.reusable_ids, rows or None, sequence.prefix_tokens)
        self._make_room()
        self._target.reserve(slot, rows)
        self._num_unplaced -= 1
        return slot

    def leave(self, sequence: QueuedSequence, *, keep: bool) -> None:
        """Free the reservation. With `keep` the slot becomes an idle conversation, otherwise it is dropped.

        Rows that plain decoding would not have computed are dropped: those at and beyond the answer's end. So the
        conversation's next turn computes the same tokens, and rounds the same way, whatever was drafted.
        """
        self.num_inside -= 1
        self._num_unplaced -= not sequence.started
        self.reserved_bytes -= sequence.kv_bytes
        if sequence.started and keep:
            slot, tenant = sequence.slot, sequence.request.tenant
            length = len(sequence.prompt_ids) + len(sequence.output_ids) - 1
            self._target.rewind(slot, min(length, len(slot.token_ids)))
            if self._kept is not None and sequence.speculation.write_back:
                self._kept.keep(tenant, slot, sequence.prefix_tokens)
            self._pool.release(tenant, slot)
        elif sequence.started:
            self._pool.drop(sequence.slot)
        self._make_room()

    def drop_idle(self) -> None:
        """Evict all idle conversations, because memory ran out."""
        self._shrink_idle(0)

    def _rows_in_place(self, sequence: QueuedSequence) -> int:
        """Rows that a request reserves in the arena; 0 if its keys and values may grow and move."""
        return self._target.tokens_in_arena(sequence.kv_bytes)

    def _clear(self, rows: int) -> bool:
        """Whether the arena has a place for that many rows; evicts idle conversations if needed."""
        if rows and not self._target.has_room(rows):
            self.drop_idle()
        return not rows or self._target.has_room(rows)

    def _make_room(self) -> None:
        self._shrink_idle(max(0, self.max_kv_bytes - self.reserved_bytes))

    def _shrink_idle(self, max_bytes: int) -> None:
        self._pool.shrink(max_bytes)
        self.idle_bytes = self._pool.nbytes


def _default_bytes(target: Target, free: Callable[[torch.device], int]) -> int:
    if target.capabilities.bitwise and target.arena_bytes:
        return target.arena_bytes
    share = SHARE_ON_CPU if target.device.type == "cpu" else SHARE_ON_ACCELERATORS
    return max(1, int(share * (free(target.device) + target.arena_bytes)))


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
