"""Precedent behind vLLM: a drafter for its workers, and middleware that tells them whose request it is.

    vllm serve MODEL --middleware precedent_vllm.Middleware --speculative-config \
      '{"method": "custom_class", "model": "precedent_vllm.Drafter", "num_speculative_tokens": 16}'

Importing it imports neither vLLM nor torch, and its names only when they are asked for: what vLLM's plugin loader
imports must not load numba (see `plugin`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precedent_vllm.drafter import Drafter
    from precedent_vllm.middleware import Middleware

__all__ = ["Drafter", "Middleware"]


def __getattr__(name: str) -> Any:
    if name == "Drafter":
        from precedent_vllm.drafter import Drafter

        return Drafter
    if name == "Middleware":
        from precedent_vllm.middleware import Middleware

        return Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
