"""Log-probabilities in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from precedent.sampling.logprobs import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "�"
"""The text of a token that holds only part of a character."""


def openai_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`{"content": [{"token", "bytes", "logprob", "top_logprobs"}, …]}`, one per token, including the end."""
    content = [
        {
            **_entry(tokenizer, one.token_id, one.logprob),
            "top_logprobs": [_entry(tokenizer, *likely) for likely in one.top],
        }
        for one in logprobs
    ]
    return {"content": content}


def _entry(tokenizer: PreTrainedTokenizerBase, token_id: int, logprob: float) -> dict[str, Any]:
    text = str(tokenizer.decode([token_id]))
    return {"token": text, "bytes": None if UNFINISHED in text else list(text.encode()), "logprob": logprob}
