"""Precedent behind vLLM: a drafter for its workers, and middleware that tells them whose request it is.

    vllm serve MODEL --middleware precedent_vllm.Middleware --speculative-config \
      '{"method": "custom_class", "model": "precedent_vllm.Drafter", "num_speculative_tokens": 16}'

Importing it imports neither vLLM nor torch.
"""

from precedent_vllm.drafter import Drafter
from precedent_vllm.middleware import Middleware

__all__ = ["Drafter", "Middleware"]
