"""What a target keeps of its forwards for drafters and judges: final hidden states, outputs of chosen layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from precedent.errors import ConfigError, UnsupportedError
from precedent.target.hidden_states import kept_by
from precedent.target.layer_outputs import LayerOutputs, outputs_kept_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precedent.target.kv.arena import KVArena
    from precedent.target.kv.shape import KVShape
    from precedent.target.runner import Runner


class KeepsStates:
    """The part of a `TargetModel` that drafters ask; call it before the first slot exists."""

    model: PreTrainedModel
    runner: Runner
    kv_shape: KVShape

    @property
    def arena(self) -> KVArena | None:
        """The memory of all sequences where forwards have fixed sizes; None otherwise."""
        raise NotImplementedError

    def keep_hidden_states(self, *, after_norm: bool = True) -> None:
        """From now on keep the last layer's output of every token (`target.hidden_states`), for drafters that read it.

        Call it before the first slot exists. Raises UnsupportedError, naming why, where they cannot be kept.
        """
        self._check_keeps()
        if self.runner.hidden is None:
            self.runner.hidden, self.kv_shape = kept_by(self.model, self.kv_shape, after_norm=after_norm)

    def keep_layer_outputs(self, numbers: Sequence[int]) -> LayerOutputs:
        """From now on keep what comes out of these layers, counted from 1, for every token (`target.layer_outputs`).

        Call it before the first slot exists. Raises UnsupportedError, naming why, where they cannot be kept, and
        ConfigError for layers that the model lacks, or where others are kept already.
        """
        self._check_keeps()
        if self.runner.outputs is None:
            self.runner.outputs, self.kv_shape = outputs_kept_by(self.model, self.kv_shape, numbers)
        if self.runner.outputs.numbers != tuple(numbers):
            raise ConfigError(f"this target keeps the layers {self.runner.outputs.numbers}, not {tuple(numbers)}")
        return self.runner.outputs

    def _check_keeps(self) -> None:
        """Raise UnsupportedError, naming why, where no hidden states can be kept."""
        if self.arena is not None:
            raise UnsupportedError(
                "forwards of fixed size (cuda_graphs=True, or bitwise=True on a GPU) keep no hidden states, which mtp, "
                "eagle, block-draft, drafts trained with --condition target and some judges read: leave that option or "
                "the reader out"
            )
