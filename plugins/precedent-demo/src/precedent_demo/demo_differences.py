"""Where the answers of one way of decoding differ from plain decoding, and how close the two tokens were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from precedent_demo.demo_runs import Run, Turn


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer differs from plain decoding, and how close the two tokens were.

    `logit_gap` is the difference between the two tokens' logits after a plain forward over the common text.
    """

    way: str
    request: int
    position: int
    logit_gap: float


def compare(
    plain: Run, other: Run, logit_gap: Callable[[Sequence[int], int, int], float]
) -> tuple[tuple[int, int], list[Difference]]:
    """The numbers of identical requests and of all requests, and the first difference of each other request."""
    differences = []
    for number, (mine, theirs) in enumerate(zip(other.requests, plain.requests, strict=True)):
        found = _first_difference(mine, theirs)
        if found is not None:
            context, position, token, plain_token = found
            gap = logit_gap(context, token, plain_token)
            differences.append(Difference(other.name, number, position, gap))
    total = len(plain.requests)
    return (total - len(differences), total), differences


def _first_difference(mine: Sequence[Turn], theirs: Sequence[Turn]) -> tuple[list[int], int, int, int] | None:
    """Context, output position and both tokens of the first difference; None if all turns are equal."""
    position = 0
    for turn, plain_turn in zip(mine, theirs, strict=False):
        answer, plain_answer = turn.result.token_ids, plain_turn.result.token_ids
        for i, (token, plain_token) in enumerate(zip(answer, plain_answer, strict=False)):
            if token != plain_token:
                return [*plain_turn.prompt_ids, *plain_answer[:i]], position + i, token, plain_token
        position += len(plain_answer)
    return None
