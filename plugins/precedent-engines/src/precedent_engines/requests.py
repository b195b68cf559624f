"""Checks of what callers of a service pass in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from precedent.cache import tools_fingerprint
from precedent.cache.records import MAX_TOKEN_ID
from precedent.drafters import check_known
from precedent.errors import ConfigError, ContextOverflowError, PromptError
from precedent.planning.costs import CostCurve, StepCosts
from precedent.runtime.plain_values import is_number, is_whole, shown
from precedent.text.codec import TokenizerCodec

OF_A_TARGET = ("draft-model", "block-draft", "eagle", "mtp", "grammar")
"""Drafters that need a target model or its rows of logits."""


def token_ids_of(token_ids: Iterable[int], what: str) -> list[int]:
    """Token ids as a list. Raises PromptError for anything else; `what` names them."""
    listed = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    try:
        found = [index(token) for token in listed]
    except TypeError:
        raise PromptError(f"{what} must be token ids, not {shown(token_ids)}") from None
    if found and not (min(found) >= 0 and max(found) <= MAX_TOKEN_ID):
        wrong = next(token for token in found if not 0 <= token <= MAX_TOKEN_ID)
        raise PromptError(f"{what} hold {wrong}, and token ids lie between 0 and {MAX_TOKEN_ID}")
    return found


def whole_number(value: object, what: str, least: int = 0) -> int:
    """A whole number of `least` or more. Raises ConfigError."""
    if not is_whole(value) or index(value) < least:  # type: ignore[arg-type]
        raise ConfigError(f"{what}={shown(value)} must be a whole number of {least} or more")
    return index(value)  # type: ignore[arg-type]


def check_drafters(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown drafter, and for one that a service cannot have."""
    if isinstance(names, str):
        raise ConfigError(f"drafters={names!r} is one text: give a list of names")
    check_known(names)
    for name in names:
        if name in OF_A_TARGET:
            raise ConfigError(f"the drafter {name!r} needs a target model, which a service does not hold: leave it out")


def curve_of(cost: CostCurve | Mapping[int, float] | None) -> CostCurve:
    """The cost curve that was given as such or by a few widths, or a new one that learns. Raises ConfigError."""
    if cost is None or isinstance(cost, CostCurve):
        return StepCosts() if cost is None else cost
    fits = isinstance(cost, Mapping) and cost
    if not fits or not all(is_whole(w) and w > 0 and is_number(ms) and ms > 0 for w, ms in cost.items()):
        raise ConfigError(f"cost={shown(cost)} must give milliseconds by width in tokens, like {{1: 20.0, 16: 26.0}}")
    return CostCurve.through({int(width): float(milliseconds) for width, milliseconds in cost.items()})


def fingerprint_of(tools: str | Sequence[Mapping[str, Any]]) -> str:
    """The fingerprint of tools that are given as their schemas, or as their fingerprint."""
    return tools if isinstance(tools, str) else tools_fingerprint(tools)


def room_after(num_tokens: int, context_length: int | None) -> int | None:
    """Tokens that fit behind a prompt, None if not known. Raises PromptError or ContextOverflowError for none."""
    if not num_tokens:
        raise PromptError("the prompt is empty: give at least one token")
    if context_length is None:
        return None
    if num_tokens >= context_length:
        raise ContextOverflowError(
            f"the prompt is too long: {num_tokens} tokens, the context holds {context_length}: no answer fits"
        )
    return context_length - num_tokens


def prediction_ids(prediction: str | Sequence[int] | None, codec: TokenizerCodec, room: int | None) -> tuple[int, ...]:
    """The prediction's ids; a text that is too long however it is tokenized is refused before that."""
    ids: tuple[int, ...] = ()
    length = ""
    if not isinstance(prediction, str):
        ids = tuple(token_ids_of(() if prediction is None else prediction, "the prediction's ids"))
    elif room is not None and len(prediction) > room * codec.longest_token:
        length = f"{len(prediction)} characters"
    else:
        ids = codec.answer_ids(prediction)
    if room is not None and len(ids) > room:
        length = f"{len(ids)} tokens"
    if length:
        raise ContextOverflowError(
            f"the prediction has {length}, and the context has room for {room} tokens after the prompt: "
            "shorten it, or leave it out"
        )
    return ids
