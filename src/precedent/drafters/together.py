"""All drafting sessions of one request, or of the requests of a batch: what they propose for a step, and their end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

from precedent.drafters.base import Candidates, DraftSession, Nodes
from precedent.drafters.matching.search import Found, Search, SearchSession, searched_together
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
    return [known(session.match(budget), num_tokens) for session in sessions]


@dataclass(slots=True, eq=False)
class Matching:
    """One request's part of a batch: its sessions by drafter, what is asked of them, and what they propose.

    `failed` has the errors of the sessions that have no `candidates` because they failed.
    """

    sessions: Mapping[str, DraftSession]
    budget: int
    num_tokens: int | None
    candidates: list[Candidates] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)


def match_together(batch: Sequence[Matching], beside: Executor | None = None, threads: int = 1) -> None:
    """Do what `match_all` does for each request, with all searches together (see `searched_together`)."""
    with ExitStack() as held:
        for lock in _locks(batch):
            held.enter_context(lock)
        asked = [(each, name, _asked(each, name)) for each in batch for name in each.sessions]
        found = iter(searched_together([search for _, _, search in asked if search is not None], beside, threads))
        for each, name, search in asked:
            if name not in each.failed:
                _take(each, name, None if search is None else next(found))


def _locks(batch: Sequence[Matching]) -> Iterable[AbstractContextManager[object]]:
    """The locks of all indexes, each once."""
    sessions = [session for each in batch for session in each.sessions.values() if isinstance(session, SearchSession)]
    return {id(session.lock): session.lock for session in sessions if session.lock is not None}.values()


def _asked(each: Matching, name: str) -> Search | None:
    session = each.sessions[name]
    if isinstance(session, SearchSession):
        try:
            return session.search(each.budget)
        except Exception as error:
            each.failed[name] = error
    return None


def _take(each: Matching, name: str, found: Found | None) -> None:
    session = each.sessions[name]
    try:
        candidates = session.take(found) if isinstance(session, SearchSession) else session.match(each.budget)
    except Exception as error:
        each.failed[name] = error
    else:
        each.candidates.append(known(candidates, each.num_tokens))


def end_all(sessions: Iterable[DraftSession]) -> None:
    """End every session, even if an earlier one fails."""
    for session in sessions:
        try:
            session.end()
        except Exception:
            _log.warning("a drafter failed at the end of a request", exc_info=_log.isEnabledFor(logging.DEBUG))


def known(candidates: Candidates, num_tokens: int | None) -> Candidates:
    """The candidates, or none if one of them is outside `num_tokens` (None: unknown)."""
    exist = num_tokens is None or not len(candidates) or all_exist(candidates.nodes, num_tokens)
    return candidates if exist else Candidates(candidates.source)


@compiled
def all_exist(nodes: Nodes, num_tokens: int) -> bool:
    """Whether every candidate's token is one of `num_tokens`."""
    exist = True
    for node in nodes:
        exist &= 0 <= node.token_id < num_tokens
    return exist
