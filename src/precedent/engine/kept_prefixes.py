"""Keeps the keys and values of prompts' beginnings on disk, so that a new process need not compute them again.

A chat prompt begins with its system turn and tools, which many requests share. After a request its beginning is written
beside the speculation cache, on one of the engine's threads. A request whose beginning no slot in memory holds reads
it back. A file is believed only if its seal, which covers every byte, fits the model, the tenant and the tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from precedent.cache import Completion
from precedent.cache.prefixes import bytes_of
from precedent.cache.records import digest
from precedent.drafters import DrafterParts
from precedent.runtime.recomputable import sealed, unsealed
from precedent.target import Slot, Target
from precedent.target.prefix_pool import WORTH_KEEPING
from precedent.text.prompt import FixedPart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FORMAT = 1
"""Increase it whenever files of before must not be read."""

TOKENS = "token_ids"
"""The tensor of a file that is not keys and values."""


class KeptPrefixes:
    """The kept beginnings of one model's prompts, by tenant. `restore` and `keep` belong to the worker's thread.

    The cache of `parts` is one on disk. `fixed_part` tells how many tokens of a chat prompt are its beginning. Raises
    what `Target.identity` raises.
    """

    def __init__(self, parts: DrafterParts, target: Target, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        assert parts.cache is not None
        assert parts.cache.prefixes is not None
        self._cache, self._files, self._executor = parts.cache, parts.cache.prefixes, parts.executor
        self._target, self._tokenizer, self.fixed_part = target, parts.tokenizer_fingerprint, FixedPart(tokenizer)
        self._fence = parts.fences.of("kept prefixes")
        identity = [FORMAT, model, self._tokenizer, target.identity()]
        self._model = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()
        self._writing: Future[None] | None = None

    def restore(self, tenant: str, token_ids: Sequence[int], room: int) -> Slot | None:
        """A new slot with exactly these tokens and room for `room`; None if they are not kept, or cannot be read."""
        return self._fence.run(lambda: self._restored(tenant, token_ids, room), None)

    def _restored(self, tenant: str, token_ids: Sequence[int], room: int) -> Slot | None:
        name = self._name(tenant, token_ids)
        content = self._files.read(tenant, name)
        if content is None:
            return None
        try:
            return self._target.restore(token_ids, opened(content, name, token_ids), room)
        except ValueError as damage:
            log.info("a kept prefix is removed: %s", damage)
            self._files.discard(tenant, name)
            return None

    def keep(self, tenant: str, slot: Slot, num_tokens: int) -> None:
        """Write the first tokens of a slot on another thread, unless they are few, kept already, or not there."""
        self._fence.run(lambda: self._keep(tenant, slot, num_tokens), None)

    def _keep(self, tenant: str, slot: Slot, num_tokens: int) -> None:
        token_ids = slot.token_ids[:num_tokens]
        if num_tokens < WORTH_KEEPING or len(token_ids) < num_tokens or self._files.read_only:
            return
        if self._target.nearest(slot, num_tokens) < num_tokens:  # a recurrent state has no snapshot there
            return
        name = self._name(tenant, token_ids)
        if self._files.holds(tenant, name) or (self._writing is not None and not self._writing.done()):
            return  # one copy at a time waits in memory; a later request keeps what is left out now
        generation, rows = self._files.generation(), self._target.save(slot, num_tokens)
        self._writing = self._fence.submit(self._executor, self._write, tenant, name, token_ids, rows, generation)

    def _write(self, tenant: str, name: str, token_ids: list[int], rows: list[Tensor], generation: int) -> None:
        text = self.fixed_part.text(token_ids)  # the cache's `redact` sees the tokens as a completion
        try:
            if self._cache.lets_pass(Completion(tuple(token_ids), self._tokenizer, "", tenant, text=text)):
                self._files.write(tenant, name, content_of(name, token_ids, rows), generation)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):  # a full disk, for example
                self._files.read_only = True
                log.warning("prefixes are no longer kept: %s", error)
            raise

    def _name(self, tenant: str, token_ids: Sequence[int]) -> str:
        tokens = np.asarray(token_ids, dtype="<i8").tobytes()
        return digest(self._model, bytes_of(tenant), tokens, size=16).hex()


def content_of(name: str, token_ids: Sequence[int], rows: Sequence[Tensor]) -> bytes:
    """The content of the file `name`: tokens and what `Target.save` returned, under a seal."""
    tensors = {f"{number:04}": part for number, part in enumerate(rows)}
    return sealed(save({TOKENS: torch.tensor(token_ids, dtype=torch.int64), **tensors}), name)


def opened(content: bytes, name: str, token_ids: Sequence[int]) -> list[Tensor]:
    """The rows in a file. Raises ValueError unless all of it is sound, and of this name and these tokens."""
    tensors = load(unsealed(content, name))
    if tensors.pop(TOKENS).tolist() != list(token_ids):
        raise ValueError("it holds other tokens")
    return [tensors[key] for key in sorted(tensors)]
