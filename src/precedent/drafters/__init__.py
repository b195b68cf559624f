"""Drafters propose tokens. `registry` lists the built-in ones; others are entry points in `precedent.drafters`.

They may read the cache and a request, but must not know how candidates are planned, verified or committed.
"""

from precedent.drafters.base import Candidates, Drafter, DraftSession, DrawSession, ForwardSession
from precedent.drafters.registry import (
    DrafterParts,
    DraftKind,
    check_known,
    kind_of,
    known_drafters,
    load_draft,
    load_drafters,
)
from precedent.drafters.request import Request

__all__ = [
    "Candidates",
    "DraftKind",
    "DraftSession",
    "Drafter",
    "DrafterParts",
    "DrawSession",
    "ForwardSession",
    "Request",
    "check_known",
    "kind_of",
    "known_drafters",
    "load_draft",
    "load_drafters",
]
