"""Drafters propose tokens. `registry` lists the built-in ones; others are entry points in `precedent.drafters`.

They may read the cache and a request, but must not know how candidates are planned, verified or committed.
"""

from precedent.drafters.base import Candidates, Drafter, DraftSession, DrawSession, ForwardSession, TextCodec
from precedent.drafters.kinds import DraftKind, kind_of, load_draft
from precedent.drafters.registry import DrafterParts, check_known, known_drafters, load_drafters
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
    "TextCodec",
    "check_known",
    "kind_of",
    "known_drafters",
    "load_draft",
    "load_drafters",
]
