"""Heads that read their target's states: what they borrow of it, their model, their KV cache and their drafter.

Entry j of a head's KV cache belongs to token j + 1 and reads what the target computed of token j. The target knows that
of every committed token; behind them the head continues from its own output, as vLLM and SGLang do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.model.place import OwnPlace, SlotOf
from precedent.drafters.request import Request
from precedent.errors import ConfigError, UnsupportedError
from precedent.target import common_prefix
from precedent.target.contract import Slot
from precedent.target.kv.cache import KVCache
from precedent.target.model import TargetModel
from precedent.target.prefix_pool import PrefixPool
from precedent.target.quantised import rows_of
from precedent.tree import CandidateTree
from precedent_cpu.quantised_linear import QuantisedLinear
from precedent_drafts.eight_bits import SomeRows

HEAD_TOKENS = "head.token_ids"
"""The tensor of a draft's folder with the token ids of its head, `[num_head_tokens]`, in increasing order."""


class RawEmbeddings(nn.Module):
    """A table of embeddings as it is stored: some models (Gemma) scale what they read from it.

    The module that holds the table is no part of this module's state.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = (module,)

    @property
    def weight(self) -> Any:
        """The table, whose device is where token ids go; None where it is quantised."""
        return getattr(self._module[0], "weight", None)

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return int(self._module[0].num_embeddings)

    @property
    def embedding_dim(self) -> int:
        """Width of the table."""
        return int(self._module[0].embedding_dim)

    def or_own(self, table: Tensor) -> RawEmbeddings:
        """Embeddings of this table, `[vocab_size, hidden_size]`; these where it equals theirs in their dtype."""
        theirs = rows_of(self._module[0], slice(None))
        own = table.to(theirs.device, theirs.dtype)
        if own.shape == theirs.shape and torch.equal(own, theirs):
            return self
        made = nn.Embedding(own.shape[0], own.shape[1], device="meta")
        made.weight = nn.Parameter(own, requires_grad=False)
        return RawEmbeddings(made)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids `[...]` to their rows, `[..., hidden_size]`."""
        return rows_of(self._module[0], input_ids)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer of these weights, `[out_features, in_features]`, which are not trained."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


class RestrictedHead(nn.Module):
    """An output head for some tokens only; all others get probability 0. Logits stay `[..., width]`."""

    token_ids: Tensor

    def __init__(self, rows: nn.Module, token_ids: Tensor, width: int) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.register_buffer("token_ids", token_ids, persistent=False)

    @classmethod
    def of(cls, head: Any, token_ids: Tensor) -> Self:
        """Some rows of a target's head, copied unless they are quantised."""
        whole = getattr(head, "quantised", None)
        ids = token_ids.to(head.weight.device if whole is None else "cpu", torch.long)
        bias = None if head.bias is None else head.bias.detach()[ids]
        if whole is not None:
            return cls(QuantisedLinear(SomeRows(whole, ids.numpy()), bias), ids, head.out_features)
        return cls(linear(rows_of(head, ids), bias), ids, head.out_features)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` to `[..., width]`, minus infinity for tokens that the head does not cover."""
        kept = self.rows(hidden)
        logits: Tensor = kept.new_full((*kept.shape[:-1], self.width), float("-inf"))
        return logits.index_copy_(-1, self.token_ids, kept)


def restrict_head(draft: PreTrainedModel, target: PreTrainedModel, token_ids: Tensor) -> None:
    """Give a draft the target's head for these tokens only: most of a small draft's work is its head."""
    draft.set_output_embeddings(RestrictedHead.of(target.get_output_embeddings(), token_ids))


def check_on_one_device(target: PreTrainedModel, what: str) -> None:
    """Raise UnsupportedError, naming what would go beside it, for a target that is spread over devices."""
    if len({parameter.device for parameter in target.parameters()}) > 1:
        raise UnsupportedError(f"{what} needs the whole target on one device: load it there, or leave it out")


class GivenStates(nn.Module):
    """Turns token ids into what the draft's first layer reads, `[1, rows, width]`.

    `give` hands in the states for the rows of the next forwards of this thread, in order; without any they are
    zero. Engines that share a draft run on threads of their own.
    """

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    @property
    def weight(self) -> Any:
        """The embeddings' weight, whose device is where token ids go; None where it is quantised."""
        return getattr(self.embeddings, "weight", None)

    def give(self, states: Sequence[Tensor]) -> None:
        """Hand in the states `[rows, hidden_size]` of each sequence; replaces what is left of earlier ones."""
        _GIVEN.set((self, torch.cat(list(states))) if states else None)

    @abstractmethod
    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Embeddings and states, each `[..., hidden_size]`, as what the first layer reads."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """The inputs of these rows."""
        embedded: Tensor = self.embeddings(input_ids)
        given = _GIVEN.get()
        if given is None or given[0] is not self:
            return self.fused(embedded, torch.zeros_like(embedded))
        rows, left = given[1].tensor_split([input_ids.shape[1]])
        _GIVEN.set((self, left))
        return self.fused(embedded, rows[None])


_GIVEN: ContextVar[tuple[GivenStates, Tensor] | None] = ContextVar("given hidden states", default=None)


StatesOf = Callable[[KVCache, int, int], Tensor]
"""What a head reads of a target's tokens, from one up to another: `[tokens, hidden_size]`."""


class HeadModel(TargetModel):
    """A head beside its target, whose states `read` gives; every slot is bound to one of the target's.

    The head's embeddings are `GivenStates`. It keeps its own output, after its final norm if it `feeds_back_normed`.
    """

    def __init__(self, head: PreTrainedModel, read: StatesOf, *, feeds_back_normed: bool) -> None:
        super().__init__(head)
        own = self.keep_hidden_states(after_norm=feeds_back_normed)
        self._inputs: GivenStates = head.get_input_embeddings()  # type: ignore[assignment]
        self._read, self._own = read, own
        self._bound: WeakKeyDictionary[Slot, SlotOf] = WeakKeyDictionary()

    def bind(self, slot: Slot, target_slot: SlotOf) -> None:
        """From now on this slot reads the states of that slot of the target."""
        self._bound[slot] = target_slot

    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """As `TargetModel.score`. Rows behind the target's committed text must come one at a time."""
        self._inputs.give([self._read_by(slot, len(tree) + 1) for slot, tree in batch])
        return super().score(batch)

    def _prefill_chunk(self, slot: Slot, token_ids: Sequence[int]) -> None:
        self._inputs.give([self._read_by(slot, len(token_ids))])
        super()._prefill_chunk(slot, token_ids)

    @torch.inference_mode()
    def _read_by(self, slot: Slot, count: int) -> Tensor:
        """The states that the next `count` entries of a slot read, `[count, hidden_size]`."""
        target, first = self._bound[slot](), slot.kv.length
        if first + count <= target.kv.length:
            return self._read(target.kv, first, first + count)
        assert count == 1, "a drafted token reads the output of the one before it"
        return self._own.of(slot.kv, first - 1, first)


def reading_hidden_states(head: PreTrainedModel, target: TargetModel, *, feeds_back_normed: bool) -> HeadModel:
    """A head that reads its target's final hidden states, which the target keeps from now on.

    Raises UnsupportedError, naming why, where they cannot be kept.
    """
    return HeadModel(head, target.keep_hidden_states().of, feeds_back_normed=feeds_back_normed)


class HeadPlace(OwnPlace):
    """A head's KV cache. It begins with a text's second token: each entry also reads what is before.

    Entries that read the target's states stay; those of drafted tokens are computed again once committed. A cache is
    shared only between texts with the same first token, on which all entries depend.
    """

    def __init__(
        self, model: HeadModel, pool: PrefixPool, tenant: str, context: list[int], target_slot: SlotOf
    ) -> None:
        super().__init__(model, pool, f"{context[0] if context else ''} {tenant}", context)
        pool.drop(self._slot)  # never lent while in use: its end may be drafted
        self._settled = len(self._slot.token_ids)
        model.bind(self._slot, target_slot)

    @property
    def behind(self) -> int:
        """Number of committed tokens that the KV cache lacks."""
        return len(text := self._text()) - min(self._settled, common_prefix(self._slot.token_ids, text))

    def caught_up(self, drafted: Sequence[int]) -> tuple[Slot, CandidateTree] | None:
        """Rewind to what the target's states gave; None after a single token."""
        assert not drafted, "a head drafts between two forwards of its target, never ahead"
        if not self._text():
            return None
        self._drop_drafted()
        found, self._settled = super().caught_up(drafted), len(self._text())
        return found

    def leave(self) -> None:
        """Keep the KV cache for the conversation's next turn, without drafted tokens."""
        self._drop_drafted()
        super().leave()

    def _drop_drafted(self) -> None:
        self._model.rewind(self._slot, min(self._settled, len(self._slot.token_ids)))

    def _text(self) -> list[int]:
        return self._context[1:]


class HeadDrafter(DraftModelDrafter):
    """Draws one chain per step as a draft model does, so that sampling stays exact.

    Requests share the head; each has its own KV cache of the head's layers, beside its slot in the target.
    """

    def __init__(self, name: str, head: HeadModel) -> None:
        super().__init__(head)
        self.name, self._head = name, head

    def place_of(self, request: Request, context: list[int]) -> HeadPlace:
        """A KV cache beside the request's slot in the target. Raises ConfigError for a request without one."""
        if request.target_slot is None:
            raise ConfigError(
                f"{self.name} reads the hidden states of its target, and this request names no target_slot"
            )
        return HeadPlace(self._head, self.pool, request.tenant, context, request.target_slot)
