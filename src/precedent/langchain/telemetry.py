"""Sets a call's attributes on its OpenTelemetry span, by the conventions for generative AI (gen_ai.*).

This module never imports OpenTelemetry: an application that has a span has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from precedent.langchain.arguments import SAMPLING

if TYPE_CHECKING:
    from precedent.config import SamplingParams
    from precedent.engine.generation import GenerationResult

PROVIDER = "precedent"
"""Our provider name; LangChain has no special handling for it."""


Span: TypeAlias = Any
"""An OpenTelemetry span."""


def current_span() -> Span | None:
    """The current span; None if none is recording."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    span: Span = trace.get_current_span() if trace else None
    return span if span is not None and span.is_recording() else None


def describe_request(span: Span, operation: str, model_name: str, sampling: SamplingParams) -> None:
    """Set the request's attributes on the span; `operation` is "chat" or "text_completion"."""
    told = [name for name in SAMPLING if name not in ("logit_bias", "stop_token_ids")]
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model_name,
        **{f"gen_ai.request.{name}": getattr(sampling, name) for name in told},
        "gen_ai.request.stop_sequences": list(sampling.stop),
    }
    _set(span, {key: value for key, value in attributes.items() if value is not None})


def describe_result(span: Span, model_name: str, result: GenerationResult) -> None:
    """Set the usage and speculation attributes of a finished call on the span."""
    of_speculation = ("mode", "num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    attributes = {
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [result.finish_reason],
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.output_tokens": len(result.token_ids),
        "gen_ai.usage.cache_read.input_tokens": result.cached_prompt_tokens,
        **{f"precedent.speculation.{name}": getattr(result.stats, name) for name in of_speculation},
    }
    _set(span, attributes)


def _set(span: Span, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        span.set_attribute(key, value)
