"""Grammars constrain an answer by masking the rows of the target model and of the draft model alike.

Use `Engine.submit(grammar=JsonSchema.of({…}))`. Descriptions are data (`spec`); llguidance enforces them.
"""

from precedent.grammar.closing import closed
from precedent.grammar.constraint import GrammarConstraint
from precedent.grammar.guidance import GuidanceEngine, check_installed, is_installed, unenforceable
from precedent.grammar.spec import (
    ANY_OBJECT,
    Answer,
    CallForm,
    Grammar,
    JsonSchema,
    Lark,
    Reasoning,
    Regex,
    Tool,
)

__all__ = [
    "ANY_OBJECT",
    "Answer",
    "CallForm",
    "Grammar",
    "GrammarConstraint",
    "GuidanceEngine",
    "JsonSchema",
    "Lark",
    "Reasoning",
    "Regex",
    "Tool",
    "check_installed",
    "closed",
    "is_installed",
    "unenforceable",
]
