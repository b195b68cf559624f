"""Precedent behind llama-cpp-python: a draft model without a model, which drafts from a speculation cache.

    draft = PrecedentDraft("orders.db", "path/of/tokenizer.json", tenant="shop")
    model = draft.attach(Llama("model.gguf", draft_model=draft, flash_attn=True))

Importing it imports neither llama_cpp nor torch.
"""

from precedent_llama_cpp.draft import PrecedentDraft

__all__ = ["PrecedentDraft"]
