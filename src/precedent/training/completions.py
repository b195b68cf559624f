"""A user's own completions as texts to learn from: each behind what was asked, as far as the cache remembers it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from precedent.cache.sqlite_store import SQLiteStore
from precedent.cache.store.fingerprint import tokenizer_fingerprint
from precedent.cache.store.records import StoredCompletion
from precedent.errors import CacheError
from precedent.text.prompt import render_prompt
from precedent.training.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_completions(path: Path, tokenizer: PreTrainedTokenizerBase, tenant: str, max_tokens: int) -> list[Text]:
    """One tenant's completions in a cache, the newest first, each cut to `max_tokens`; the cache is only read.

    A cache keeps no prompts: the text by which a completion is recalled stands for it, as a user's message. Raises
    CacheError when the cache cannot be read, or holds nothing of this tenant and tokenizer.
    """
    store = SQLiteStore.open(path, read_only=True)
    try:
        found = store.since(tenant, tokenizer_fingerprint(tokenizer))
    finally:
        store.close()
    if not found:
        raise CacheError(
            f"{path} holds no completions of tenant {tenant!r} by this model's tokenizer; see precedent cache stats"
        )
    return [_text(completion, tokenizer, max_tokens) for completion in reversed(found)]


def _text(completion: StoredCompletion, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Text:
    asked = render_prompt(tokenizer, [{"role": "user", "content": completion.query}])
    answer = completion.token_ids[:max_tokens]
    return Text((*asked, *answer), len(answer))
