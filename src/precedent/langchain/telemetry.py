"""Sets a call's attributes on its OpenTelemetry span, by the conventions for generative AI (gen_ai.*).

This module never imports OpenTelemetry: an application that has a span has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from precedent.langchain.arguments import SAMPLING

if TYPE_CHECKING:
    from precedent.config import SamplingParams
    from precedent.engine.generation import GenerationResult

PROVIDER = "precedent"

OF_TOKEN_IDS = ("logit_bias", "stop_token_ids")
"""Settings without an attribute in the conventions."""


class Span(Protocol):
    """The parts of an OpenTelemetry span that are used here."""

    def is_recording(self) -> bool:
        """True if the span records attributes."""

    def set_attribute(self, key: str, value: Any, /) -> None:
        """Set one attribute."""


def current_span() -> Span | None:
    """The current span; None if none is recording."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    span: Span | None = trace.get_current_span() if trace else None
    return span if span is not None and span.is_recording() else None


def describe_result(span: Span, model_name: str, result: GenerationResult) -> None:
    """Set the usage and speculation attributes of a finished call on the span."""
    stats = result.stats
    attributes = {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [result.finish_reason],
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.output_tokens": len(result.token_ids),
        "gen_ai.usage.cache_read.input_tokens": result.cached_prompt_tokens,
        "precedent.speculation.mode": stats.mode,
        "precedent.speculation.num_steps": stats.num_steps,
        "precedent.speculation.num_drafts": stats.num_drafts,
        "precedent.speculation.num_draft_tokens": stats.num_draft_tokens,
        "precedent.speculation.num_accepted_tokens": stats.num_accepted_tokens,
    }
    for key, value in attributes.items():
        span.set_attribute(key, value)


def describe_request(span: Span, operation: str, model_name: str, sampling: SamplingParams) -> None:
    """Set the request's attributes on the span; `operation` is "chat" or "text_completion"."""
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_name,
        **{f"gen_ai.request.{name}": getattr(sampling, name) for name in SAMPLING if name not in OF_TOKEN_IDS},
        "gen_ai.request.stop_sequences": list(sampling.stop),
    }
    for key, value in attributes.items():
        if value is not None:
            span.set_attribute(key, value)
