"""The MTP head of a target's checkpoint, ready to draft: it reads the target's hidden states."""

from __future__ import annotations

from precedent.errors import ConfigError
from precedent.target.head_model import HeadModel, reading_hidden_states
from precedent.target.model import TargetModel
from precedent.target.mtp.families import family_of
from precedent.target.mtp.head import load_head


def head_beside(target: TargetModel, *, draws_ahead: bool) -> HeadModel:
    """The head in a target's checkpoint, ready to draft; the target keeps hidden states from now on.

    Raises ConfigError where there is none, or where a draft model draws ahead of the target; UnsupportedError and
    ModelLoadError where the head cannot be used, each naming the reason.
    """
    if draws_ahead:
        raise ConfigError(
            "mtp reads the target's hidden states between two steps, and pearl draws while the target scores: set "
            "pearl=False, or leave mtp out of the drafters"
        )
    family = family_of(target.model.config.get_text_config())
    target.keep_hidden_states()  # before anything is read: it may be refused
    head = load_head(target.model, family)
    return reading_hidden_states(head, target, feeds_back_normed=family.feeds_back_normed)
