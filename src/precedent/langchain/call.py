"""One call of a model in LangChain's words, read and rendered: what `EngineFields` submits to an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from precedent.grammar import Grammar
from precedent.text.templates import Template

if TYPE_CHECKING:
    from precedent.engine.engine import Engine, Generation
    from precedent.text.answers import AnswerSyntax


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the prompt, what the caller asked for, and what the prompt says about the request.

    `settings` are the checked keyword arguments, `stop` and `metadata` what LangChain passes beside them; the rest are
    arguments of `Engine.submit`.
    """

    prompt_ids: Sequence[int]
    settings: Mapping[str, Any]
    stop: Sequence[str] | None
    metadata: Mapping[str, Any] | None
    query: str
    templates: tuple[Template, ...]
    tools: str = ""
    grammar: Grammar | None = None
    shown_tokens: Collection[int] = ()
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that runs, and how to read its answer; `notes` say what its grammar does not enforce."""

    engine: Engine
    generation: Generation
    syntax: AnswerSyntax
    notes: Mapping[str, Any] = field(default_factory=dict)
