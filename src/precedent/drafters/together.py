"""All drafting sessions of one request: what they propose for a step, and their end."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from precedent.drafters.base import Candidates, DraftSession, Nodes
from precedent.runtime.compiled import compiled

_log = logging.getLogger(__name__)

FEW = 8
"""Fewest candidates requested from each drafter."""


def match_budget(most: int, last: int | None) -> int:
    """Candidates to request from each drafter: twice what the last plan used (`last`); at first, the `most` allowed."""
    return most if last is None else min(most, max(FEW, 2 * last))


def match_all(sessions: Iterable[DraftSession], budget: int, num_tokens: int | None) -> list[Candidates]:
    """Every session's candidates for the next step; none from a session that names a token outside `num_tokens`.

    A damaged cache may propose tokens that the tokenizer does not have. None for `num_tokens` checks nothing.
    """
    return [_known(session.match(budget), num_tokens) for session in sessions]


def end_all(sessions: Iterable[DraftSession]) -> None:
    """End every session, even if an earlier one fails."""
    for session in sessions:
        try:
            session.end()
        except Exception:
            _log.warning("a drafter failed at the end of a request", exc_info=_log.isEnabledFor(logging.DEBUG))


def _known(candidates: Candidates, num_tokens: int | None) -> Candidates:
    exist = num_tokens is None or all_exist(candidates.nodes, num_tokens)
    return candidates if exist else Candidates(candidates.source)


@compiled
def all_exist(nodes: Nodes, num_tokens: int) -> bool:
    """Whether every candidate's token is one of `num_tokens`."""
    exist = True
    for node in nodes:
        exist &= 0 <= node.token_id < num_tokens
    return exist
