"""The target model: prefill, score a candidate tree in one forward pass, commit the accepted path, discard the rest."""

from precedent.target.contract import Capabilities, Slot, Target, common_prefix
from precedent.target.kv.cache import KVCache
from precedent.target.model import TargetModel

__all__ = ["Capabilities", "KVCache", "Slot", "Target", "TargetModel", "common_prefix"]
