"""Drafting for engines that have their own target model (vLLM, SGLang, llama.cpp): sessions without torch.

It stands on the same drafters, stores and planner as the engine, and knows no target model: the caller verifies what it
is given and reports what was committed. Importing it loads neither torch nor transformers.
"""

from precedent_engines.service import DRAFTERS, DraftingService, ServiceMetrics
from precedent_engines.session import DraftingSession

__all__ = ["DRAFTERS", "DraftingService", "DraftingSession", "ServiceMetrics"]
