"""Precedent behind SGLang: a client that keeps its external corpora filled, and a hook in its n-gram worker.

    with Corpora("http://127.0.0.1:30000", cache, tokenizer, tenant="shop") as corpora:
        corpora.refill(["where is my order?"], tenant="shop")

Importing it imports neither SGLang nor torch.
"""

from precedent_sglang.corpora import Corpora, Filled
from precedent_sglang.server import LoadInProgress, ServerError, SGLangServer

__all__ = ["Corpora", "Filled", "LoadInProgress", "SGLangServer", "ServerError"]
