"""Grammars: what an answer may be, as masks on the target model's rows and on the draft model's alike.

`Engine.submit(grammar=JsonSchema.of({…}))`; descriptions are data (`spec`), the engine behind them is llguidance.
"""

from precedent.grammar.closing import closed
from precedent.grammar.constraint import GrammarConstraint
from precedent.grammar.guidance import GuidanceEngine, check_installed, is_installed, unenforceable
from precedent.grammar.matching import GrammarEngine, TokenMatcher
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
    "GrammarEngine",
    "GuidanceEngine",
    "JsonSchema",
    "Lark",
    "Reasoning",
    "Regex",
    "TokenMatcher",
    "Tool",
    "check_installed",
    "closed",
    "is_installed",
    "unenforceable",
]
