"""Drafters: who proposes tokens. Ours stand in the table of `registry`, others' are entry points `precedent.drafters`.

May read the cache and a request; may not know how candidates are planned, verified or committed.
"""

from precedent.drafters.base import Candidates, Drafter, DraftSession, DrawSession
from precedent.drafters.codec import TextCodec
from precedent.drafters.registry import DrafterParts, check_known, known_drafters, load_drafters
from precedent.drafters.request import Request

__all__ = [
    "Candidates",
    "DraftSession",
    "Drafter",
    "DrafterParts",
    "DrawSession",
    "Request",
    "TextCodec",
    "check_known",
    "known_drafters",
    "load_drafters",
]
