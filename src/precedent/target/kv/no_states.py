"""What our caches answer when transformers' recurrent modules ask for a state."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class NoStates:
    """A cache that has no state and takes none: the running step has them (`target.recurrent`).

    A module that is told so computes all its rows at once, with functions that ours replace.
    """

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """No window."""

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """No state."""

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """None before this forward."""
        return False

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        """Nothing is recorded."""
        return False

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The new inputs alone; the window before them is added where they are convolved."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing is stored."""
        return recurrent_states
