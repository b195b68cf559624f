"""Keeps slots of finished requests, so that the next call of a conversation prefills only its new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from precedent.target.contract import Slot, Target, common_prefix

DEFAULT_MAX_BYTES = 512 * 2**20

CONTINUED_WITHIN = 16
"""A prompt that leaves a slot at most this many tokens before its end continues it (a re-rendered last turn)."""

WORTH_KEEPING = 64
"""Fewer tokens than this are computed sooner than their keys and values are read from elsewhere."""


class Kept(Protocol):
    """Keys and values of prompts' beginnings that are kept elsewhere."""

    def restore(self, tenant: str, token_ids: Sequence[int], room: int) -> Slot | None:
        """A new slot that holds exactly these tokens, with room for `room`; None if they are not kept."""


@dataclass(slots=True, eq=False)
class _Idle:
    """A slot that is not in use, with its tokens as an array for fast comparison with prompts."""

    tenant: str
    slot: Slot
    token_ids: NDArray[np.int64]


@dataclass(slots=True)
class PrefixPool:
    """Idle slots per tenant, least recently used first; `max_bytes` bounds their KV caches together.

    A slot never crosses tenants: the time that a prefill takes would reveal whether another tenant sent that prompt.
    Slots in use lend their prefix too, so concurrent requests under one system prompt compute it once. What no slot
    holds may be in `kept`. A target that encodes prompts shares nothing between them: each gets a new slot. Call it
    from the thread that runs the target, between forwards.
    """

    target: Target
    max_bytes: int = DEFAULT_MAX_BYTES
    kept: Kept | None = None
    _idle: list[_Idle] = field(default_factory=list)
    _in_use: WeakKeyDictionary[Slot, str] = field(default_factory=WeakKeyDictionary)

    @property
    def nbytes(self) -> int:
        """Bytes that the idle slots hold."""
        return sum(self.target.slot_bytes(idle.slot) for idle in self._idle)

    def acquire(self, tenant: str, prompt_ids: Sequence[int], room: int | None = None, prefix_tokens: int = 0) -> Slot:
        """The tenant's slot that holds most of the prompt, or a fork of it; it is no longer idle.

        A fork gets room for `room` tokens (None: for the prompt). The first `prefix_tokens` of the prompt may be in
        `kept`.

        An idle slot that the prompt continues is taken over. One that only shares a prefix with it (another
        conversation under the same system prompt), or that is in use, is forked, so its own conversation can continue.
        """
        if self.target.encodes_prompt:
            return self.target.new_slot()
        room = len(prompt_ids) if room is None else room
        slot = self._best(tenant, np.asarray(prompt_ids[:-1], dtype=np.int64), room, prefix_tokens)
        self._in_use[slot] = tenant
        return slot

    def release(self, tenant: str, slot: Slot) -> None:
        """Take a slot back; drops the oldest idle slots when the pool holds more than `max_bytes`."""
        self.drop(slot)
        self.target.discard(slot)
        keeps = slot.token_ids and not self.target.encodes_prompt
        if keeps and self.target.slot_bytes(slot) <= self.max_bytes:
            self._idle.append(_Idle(tenant, slot, np.asarray(slot.token_ids, dtype=np.int64)))
            self.shrink(self.max_bytes)

    def drop(self, slot: Slot) -> None:
        """Stop lending from a slot that was in use: after a failure its content cannot be trusted."""
        self._in_use.pop(slot, None)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used idle slots until the others hold at most `max_bytes`."""
        held, gone = self.nbytes, 0
        while held > max_bytes:
            held -= self.target.slot_bytes(self._idle[gone].slot)
            gone += 1
        del self._idle[:gone]

    def _best(self, tenant: str, context: NDArray[np.int64], room: int, prefix_tokens: int) -> Slot:
        length, shared, idle = 0, 0, None
        for each in reversed(self._idle):  # the most recent of equals
            if each.tenant == tenant:
                common = common_prefix(each.token_ids, context)
                usable = self.target.nearest(each.slot, common)
                if usable > length:
                    length, shared, idle = usable, common, each
        lender, lent = None, length
        for slot, user in self._in_use.items():
            if user == tenant:
                usable = self.target.nearest(slot, common_prefix(slot.token_ids, context))
                if usable > lent:
                    lender, lent = slot, usable
        if self.kept is not None and prefix_tokens >= lent + WORTH_KEEPING:
            kept = self.kept.restore(tenant, context[:prefix_tokens].tolist(), room)
            if kept is not None:
                return kept
        if lender is not None:
            return self.target.fork(lender, lent, room)
        if idle is None:
            return self.target.new_slot()
        self._idle.remove(idle)
        if len(idle.token_ids) - shared <= CONTINUED_WITHIN:
            return idle.slot
        self._idle.append(idle)  # most recently used: others are dropped before it
        return self.target.fork(idle.slot, length, room)
