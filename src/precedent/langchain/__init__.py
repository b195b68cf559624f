"""LangChain: `ChatPrecedent` replaces another chat model.

Public names load on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precedent.langchain.chat_model import ChatPrecedent
    from precedent.langchain.llm import PrecedentLLM
    from precedent.langchain.middleware import SpeculationMiddleware
    from precedent.langchain.recorded import RecordingCache
    from precedent.langchain.similarity import LangChainEmbedder, PrecedentEmbeddings, in_vector_store

_HOMES = {
    "ChatPrecedent": "chat_model",
    "LangChainEmbedder": "similarity",
    "PrecedentEmbeddings": "similarity",
    "PrecedentLLM": "llm",
    "RecordingCache": "recorded",
    "SpeculationMiddleware": "middleware",
    "in_vector_store": "similarity",
}

__all__ = [
    "ChatPrecedent",
    "LangChainEmbedder",
    "PrecedentEmbeddings",
    "PrecedentLLM",
    "RecordingCache",
    "SpeculationMiddleware",
    "in_vector_store",
]


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'precedent.langchain' has no attribute {name!r}")
    return getattr(import_module(f"precedent.langchain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
