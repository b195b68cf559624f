"""Slots of finished requests, kept so that the next call of a conversation prefills only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from precedent.target.model import Slot, TargetModel, common_prefix

DEFAULT_MAX_BYTES = 512 * 2**20

CONTINUED_WITHIN = 16
"""A prompt that leaves a slot at most this many tokens before its end continues it (a re-rendered last turn)."""


@dataclass(slots=True)
class PrefixPool:
    """Idle slots per tenant, least recently used first; `max_bytes` bounds their KV caches together.

    A slot never crosses tenants: how fast a prompt is prefilled would tell whether somebody else sent it before.
    """

    target: TargetModel
    max_bytes: int = DEFAULT_MAX_BYTES
    _idle: list[tuple[str, Slot]] = field(default_factory=list)

    def acquire(self, tenant: str, prompt_ids: Sequence[int]) -> Slot:
        """A slot that holds as much of the prompt as any of the tenant's idle slots; it is no longer in the pool.

        A slot that the prompt continues is taken over. One that it merely resembles (another conversation under the
        same system prompt) is forked, so that the other conversation finds its own again.
        """
        shared = [
            (common_prefix(slot.token_ids, prompt_ids), place)
            for place, (owner, slot) in enumerate(self._idle)
            if owner == tenant
        ]
        longest, place = max(shared, default=(0, -1))
        if longest == 0:
            return self.target.new_slot()
        slot = self._idle[place][1]
        if len(slot.token_ids) - longest > CONTINUED_WITHIN:
            return self.target.fork(slot, longest)
        return self._idle.pop(place)[1]

    def release(self, tenant: str, slot: Slot) -> None:
        """Take a slot back; the oldest ones go when the pool holds more than `max_bytes`."""
        self.target.discard(slot)
        self._idle.append((tenant, slot))
        self.shrink(self.max_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes held by all idle slots."""
        return sum(slot.kv.nbytes for _, slot in self._idle)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used slots until the others hold at most `max_bytes`."""
        while self._idle and self.nbytes > max_bytes:
            self._idle.pop(0)
