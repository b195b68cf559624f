"""Drafters propose tokens. `registry` lists the built-in ones; others are entry points in `precedent.drafters`.

They may read the cache and a request, but must not know how candidates are planned, verified or committed.
"""

from precedent.drafters.base import Candidates, Drafter, DraftSession, DrawSession, ForwardSession
from precedent.drafters.codec import TextCodec
from precedent.drafters.registry import DrafterParts, check_known, known_drafters, load_drafters
from precedent.drafters.request import Request

__all__ = [
    "Candidates",
    "DraftSession",
    "Drafter",
    "DrafterParts",
    "DrawSession",
    "ForwardSession",
    "Request",
    "TextCodec",
    "check_known",
    "known_drafters",
    "load_drafters",
]
