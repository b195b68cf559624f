"""All that is asked of llama-cpp-python itself. Everything else here works on arrays and plain answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precedent.errors import CacheMismatchError, UnsupportedError

RUN = ("0.3.36",)
"""Versions that the tests run."""

FLASH_ATTENTION = 1
"""`LLAMA_FLASH_ATTN_TYPE_ENABLED`."""


class LlamaCpp:
    """The installed llama-cpp-python."""

    def version(self) -> str:
        """The installed version."""
        import llama_cpp

        return str(llama_cpp.__version__)

    def check(self, model: Any, draft: Any, vocabulary: Mapping[str, int]) -> None:
        """See that a `Llama` verifies drafts of this tokenizer exactly.

        Raises UnsupportedError for an unknown version, another draft model or no flash attention, and
        CacheMismatchError for a model of other tokens.
        """
        if self.version() not in RUN:
            raise UnsupportedError(
                f"precedent-llama-cpp knows llama-cpp-python {', '.join(RUN)}, and this is {self.version()}: install "
                "that one, or a newer precedent-llama-cpp"
            )
        if model.draft_model is not draft:
            raise UnsupportedError("this Llama has another draft model: make it with draft_model= this one")
        if model.context_params.flash_attn_type != FLASH_ATTENTION:
            raise UnsupportedError(
                "this Llama was made without flash_attn=True: greedy answers then differ from those without drafts, "
                "because its attention rounds differently for one row than for several"
            )
        _check_tokens(model, vocabulary)

    def end_tokens(self, model: Any) -> set[int]:
        """The token that ends an answer, if the model has one."""
        return {token for token in (model.token_eos(),) if token >= 0}


def _check_tokens(model: Any, vocabulary: Mapping[str, int]) -> None:
    count = model.n_vocab()
    for text, token in vocabulary.items():
        if token >= count or model._model.token_get_text(token) != text:
            found = repr(model._model.token_get_text(token)) if token < count else "not there"
            raise CacheMismatchError(
                f"the tokenizer is not this model's: token {token} is {text!r}, in the GGUF file it is {found}. Give "
                "the tokenizer.json of the model that the file was made from"
            )
