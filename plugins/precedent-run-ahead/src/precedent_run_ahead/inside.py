"""Sees what a tool runs inside while it runs ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler


class Inside(BaseCallbackHandler):
    """Notes whether the tool runs a graph or a model of its own: a stream shows their steps and words.

    A result that ran ahead could not show them any more, so `reason` says why such a tool must not run ahead.
    """

    run_inline = True

    def __init__(self) -> None:
        self.reason: str | None = None

    def on_chain_start(self, serialized: Any, inputs: Any, *, tags: Sequence[str] | None = None, **others: Any) -> None:
        """Note a node of a graph, which LangGraph tags with its step."""
        if any(tag.startswith("graph:step:") for tag in tags or ()):
            self.reason = "it runs a graph of its own, whose steps a stream would show"

    def on_llm_start(self, serialized: Any, prompts: Any, **others: Any) -> None:
        """Note a model."""
        self._model()

    def on_chat_model_start(self, serialized: Any, messages: Any, **others: Any) -> None:
        """Note a model."""
        self._model()

    def _model(self) -> None:
        self.reason = self.reason or "it asks a model of its own, whose words a stream would show"
