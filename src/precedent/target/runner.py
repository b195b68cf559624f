"""Runs the rows of one or several sequences through the model, batched where its architecture allows."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from precedent.errors import UnsupportedError
from precedent.runtime.team import TEAM, fitted_team
from precedent.target.attention import NAME
from precedent.target.hidden_states import HiddenStates
from precedent.target.kv.layer_kinds import FULL_ATTENTION, SLIDING_ATTENTION, attention_kinds
from precedent.target.kv.rows import ForwardPass, Rows, Rule, additive, visible_keys
from precedent.target.support import Backend, LayerState


def use_tree_attention(model: PreTrainedModel, packs: bool | None = None) -> bool:
    """Switch a model to `precedent` attention; False if its architecture has no such switch or `eager` was asked for.

    `packs` replaces what the architecture declares (`LayerState.packs`).
    A model without `sdpa` support (gpt-oss) has `eager` as its default, so there `eager` does not count as asked for.
    """
    chosen = model.config._attn_implementation
    if packs is False:
        return False
    declared = model._supports_attention_backend or packs
    if not (declared or chosen == NAME) or (chosen == "eager" and model._supports_sdpa):
        return False
    if chosen != NAME:
        model.set_attn_implementation(NAME)
    return True


class Runner:
    """A model and how it is called: all sequences in one forward (`packed`), or one sequence at a time.

    With `most_rows`, no forward has more rows, and a forward that would round rows differently is refused
    (`target.bitwise`). The first of `backends` that supports a packed forward computes it, otherwise the model does.
    `hidden` and `outputs`, if set, keep what drafters read of every row. `team` chooses the number of threads; the last
    forward had `threads`.

    `layer_state` says how its layers run. With `only_chains`, the reason why the model follows no trees, a forward is
    one chain of one sequence.

    Architectures that bypass transformers' attention interface, or change keys or masks on the way, run one sequence at
    a time and get the tree as a 4D mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packed: bool,
        only_chains: str | None = None,
        layer_state: LayerState | None = None,
    ) -> None:
        self.model, self.packed, self.only_chains = model, packed, only_chains
        self.layer_state = layer_state or LayerState()
        self.team, self.threads = TEAM, 1
        self.most_rows: int | None = None
        self.backends: list[Backend] = []
        self.hidden: HiddenStates | None = None
        self.outputs: HiddenStates | None = None
        self.settled = True
        """Whether the time of the last `logits` says what such a step will cost: not where graphs were captured, nor
        where rows found no room among the fixed sizes."""

    @property
    def way(self) -> str:
        """What one forward takes."""
        return "a path" if self.only_chains else "a batch of trees" if self.packed else "a tree"

    @property
    def device(self) -> torch.device:
        """Where input ids go; accelerate moves them if the first layer's weights are stored elsewhere."""
        weight: Any = getattr(self.model.get_input_embeddings(), "weight", None)  # a quantiser may rename it
        device: torch.device = self.model.device if weight is None else weight.device
        return torch.device("cpu") if device.type == "meta" else device

    def logits(self, sequences: Sequence[Rows]) -> list[Tensor]:
        """Logits after every row, `[rows, vocab_size]` for each sequence; keys and values are stored, not yet kept."""
        self.settled, found = True, list[Tensor]()
        with self._computing(sequences):
            for together in batches(sequences, self.most_rows) if self.packed else ([rows] for rows in sequences):
                forward = self.forward_of(together)
                with self._keeping(forward):
                    logits = self._by_backends(forward)
                    if logits is None:
                        logits = self.own(forward)
                found += [logits[start:stop] for start, stop in forward.spans]
        return found

    def fill(self, rows: Rows) -> None:
        """Compute keys and values of a chain of rows, and as few logits as the architecture allows."""
        with self._computing([rows]):
            forward = self.forward_of([rows])
            with self._keeping(forward):
                if self.hidden is not None or not any(backend.fill(forward) for backend in self.backends):
                    self.own(forward, **({"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}))

    @contextmanager
    def using(self, *backends: Backend) -> Iterator[None]:
        """Run with these backends alone, to compare what they compute with the model's own forward."""
        before, self.backends = self.backends, list(backends)
        try:
            yield
        finally:
            self.backends = before

    def forward_of(self, sequences: Sequence[Rows]) -> ForwardPass:
        """One forward over the rows of some sequences."""
        return ForwardPass(sequences, by_rows=self.most_rows is not None)

    def own(self, forward: ForwardPass, **settings: Any) -> Tensor:
        """Logits of the model's own forward, `[rows, vocab_size]`."""
        if not self.packed:
            settings["attention_mask"] = self._mask(forward.sequences[0])
        with ExitStack() as stack:
            if self.outputs is not None:
                stack.enter_context(self.outputs.hooked())
            if self.packed:
                stack.enter_context(forward.running())
            stack.enter_context(self.layer_state.running(forward))
            logits: Tensor = self.model(**self.inputs(forward), **settings).logits
        return logits[0]

    def _by_backends(self, forward: ForwardPass) -> Tensor | None:
        found = (backend.logits(forward) for backend in self.backends)
        logits = next((each for each in found if each is not None), None)
        self.settled = self.settled and all(backend.settled for backend in self.backends)
        return logits

    @contextmanager
    def _computing(self, sequences: Sequence[Rows]) -> Iterator[None]:
        """Make room for the rows, and choose the number of threads."""
        for rows in sequences:
            rows.kv.reserve(rows.kv.length + len(rows))
        with fitted_team(self.team) as self.threads:
            yield

    @contextmanager
    def _keeping(self, forward: ForwardPass) -> Iterator[None]:
        with ExitStack() as kept:
            for each in (self.hidden, self.outputs):
                if each is not None:
                    kept.enter_context(each.kept_from(forward))
            yield

    def inputs(self, forward: ForwardPass) -> dict[str, Any]:
        """The arguments of the model's forward, by the names that it has for them."""
        inputs = forward.inputs(self.device)
        if self.only_chains:
            del inputs["position_ids"]  # some count positions in their own way, from the cache's length
        if "past_key_values" not in self._parameters and "cache_params" in self._parameters:  # Mamba
            return {"input_ids": inputs["input_ids"], "cache_params": inputs["past_key_values"], "use_cache": True}
        return inputs

    def _mask(self, rows: Rows) -> Tensor | dict[str, Tensor | None] | None:
        """A 4D mask, or one per kind of layer; None for a chain, which every model masks by itself."""
        if rows.ancestors is None or self.only_chains or not self._rules:
            return None
        masks = {kind: None if rule is None else self._mask_of(rows, rule) for kind, rule in self._rules.items()}
        return dict(masks) if len(masks) > 1 else next(iter(masks.values()))

    def _mask_of(self, rows: Rows, rule: Rule) -> Tensor:
        allowed = visible_keys(rows, rule, None, self.device).allowed
        assert allowed is not None  # only a chain or a single row needs no mask
        num_keys = rows.kv.length + len(rows)
        if self.model.config._attn_implementation == "eager":
            return additive(allowed, num_keys, self.model.dtype)[None, None]
        return pad(allowed, (num_keys - allowed.shape[1], 0), value=True)[None, None]

    @cached_property
    def _rules(self) -> dict[str, Rule | None]:
        config = self.model.config.get_text_config()
        masks = self.layer_state.masks(attention_kinds(config))
        rules: dict[str | None, Rule | None] = {None: None, FULL_ATTENTION: causal_mask_function}
        if SLIDING_ATTENTION in masks.values():
            rules[SLIDING_ATTENTION] = sliding_window_causal_mask_function(config.sliding_window)
        unknown = sorted(kind for kind in masks.values() if kind not in rules and kind is not None)
        if unknown:
            raise UnsupportedError(f"{config.model_type} with eager attention does not support {', '.join(unknown)}")
        return {name: rules[kind] for name, kind in masks.items()}

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.model.forward).parameters)


RowsOf = TypeVar("RowsOf", bound=Sized)
"""The rows of one sequence, whatever holds them."""


def batches(sequences: Sequence[RowsOf], most_rows: int | None) -> Iterator[list[RowsOf]]:
    """Batches of sequences in their order, at most `most_rows` rows each; a wider sequence gets its own batch."""
    batch: list[RowsOf] = []
    for rows in sequences:
        if batch and most_rows is not None and sum(map(len, batch)) + len(rows) > most_rows:
            yield batch
            batch = []
        batch.append(rows)
    if batch:
        yield batch
