"""Turns cached completions into texts to learn from: each follows its request, as far as the cache remembers it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from precedent.cache import Completion, SQLiteStore, tokenizer_fingerprint
from precedent.errors import CacheError
from precedent.text.prompt import render_prompt
from precedent_drafts.training.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_completions(path: Path, tokenizer: PreTrainedTokenizerBase, tenant: str, max_tokens: int) -> list[Text]:
    """Read one tenant's completions from a cache, newest first, each cut to `max_tokens`; the cache is not changed.

    A cache keeps no prompts, so the completion's recall query replaces its prompt, as a user message. Raises CacheError
    if the cache cannot be read, or holds no completions of this tenant and tokenizer.
    """
    store = SQLiteStore.open(path, read_only=True)
    try:
        found = store.since(tenant, tokenizer_fingerprint(tokenizer))
    finally:
        store.close()
    if not found:
        raise CacheError(
            f"{path} holds no completions of tenant {tenant!r} for this model's tokenizer; see precedent cache stats"
        )
    return [_text(completion, tokenizer, max_tokens) for completion in reversed(found)]


def _text(completion: Completion, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Text:
    asked = render_prompt(tokenizer, [{"role": "user", "content": completion.query}])
    answer = completion.token_ids[:max_tokens]
    return Text((*asked, *answer), len(answer))
