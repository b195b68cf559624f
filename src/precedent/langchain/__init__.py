"""LangChain: `ChatPrecedent` in place of another chat model, nothing else changed."""

from __future__ import annotations

from precedent.langchain.chat_model import ChatPrecedent

__all__ = ["ChatPrecedent"]
