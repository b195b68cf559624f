"""All drafting sessions of one request, or of the requests of a batch: what they propose for a step, and their end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
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
    return [_known(session.match(budget), num_tokens) for session in sessions]


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
        for lock in {id(each.lock): each.lock for each in _searching(batch)}.values():
            held.enter_context(lock)
        searches = [_asked(each) for each in batch]
        wanted = [search for asked in searches for search in asked.values() if search is not None]
        found = iter(searched_together(wanted, beside, threads))
        for each, asked in zip(batch, searches, strict=True):
            _take(each, asked, {name: next(found) for name, search in asked.items() if search is not None})


def _searching(batch: Sequence[Matching]) -> Iterable[SearchSession]:
    return (session for each in batch for session in each.sessions.values() if isinstance(session, SearchSession))


def _asked(each: Matching) -> dict[str, Search | None]:
    asked: dict[str, Search | None] = {}
    for name, session in each.sessions.items():
        if isinstance(session, SearchSession):
            try:
                asked[name] = session.search(each.budget)
            except Exception as error:
                each.failed[name] = error
    return asked


def _take(each: Matching, asked: Mapping[str, Search | None], found: Mapping[str, Found]) -> None:
    for name, session in each.sessions.items():
        if name in each.failed:
            continue
        try:
            if isinstance(session, SearchSession):
                candidates = session.take(found.get(name))
            else:
                candidates = session.match(each.budget)
        except Exception as error:
            each.failed[name] = error
            continue
        each.candidates.append(_known(candidates, each.num_tokens))


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
