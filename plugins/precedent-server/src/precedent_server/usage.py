"""Token counts in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openai.types.completion_usage import CompletionTokensDetails, CompletionUsage, PromptTokensDetails

if TYPE_CHECKING:
    from precedent.engine.generation import GenerationResult

PREDICTION = "prediction"
"""The drafter that proposes the request's own `prediction`."""


def usage_of(results: Sequence[GenerationResult], reasoning_tokens: int = 0) -> CompletionUsage:
    """The usage of a request's answers; its prompt counts once.

    Accepted and rejected prediction tokens are those of `prediction` alone. Rejected ones are not billed: they are no
    part of `completion_tokens`, which OpenAI would add them to.
    """
    prompt, written = results[0].prompt_tokens, sum(len(result.token_ids) for result in results)
    accepted = sum(result.stats.accepted_by_source[PREDICTION] for result in results)
    drafted = sum(result.stats.drafted_by_source[PREDICTION] for result in results)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=results[0].cached_prompt_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=reasoning_tokens,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=max(0, drafted - accepted),
        ),
    )


def speculation_of(results: Sequence[GenerationResult]) -> Any:
    """What speculation did: one entry, or a list for several answers."""
    told = [{**result.stats.as_dict(), "tokens_per_step": round(result.stats.tokens_per_step, 3)} for result in results]
    return told[0] if len(told) == 1 else told
