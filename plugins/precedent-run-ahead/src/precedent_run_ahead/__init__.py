"""`RunAheadMiddleware`: starts the agent's next tool calls before the model has asked for them.

The pure parts are in `precedent_run_ahead.actions`; here is what knows LangChain: which tools and which middleware
allow it, how a call runs ahead, and what the model says while it writes. Nothing here decides what an agent answers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precedent_run_ahead.marks import read_only
    from precedent_run_ahead.middleware import RunAheadMiddleware

__all__ = ["RunAheadMiddleware", "read_only"]

_HOMES = {"RunAheadMiddleware": "middleware", "read_only": "marks"}


def __getattr__(name: str) -> object:
    """Import a public name on first use: `precedent_run_ahead.actions` needs no LangChain."""
    if name not in _HOMES:
        raise AttributeError(f"module 'precedent_run_ahead' has no attribute {name!r}")
    value: object = getattr(import_module(f"precedent_run_ahead.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
