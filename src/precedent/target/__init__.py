"""The target model: prefill, score a candidate tree in one forward pass, commit the accepted path, discard the rest."""

from precedent.target.kv.cache import KVCache
from precedent.target.model import TargetModel
from precedent.target.prefixes import common_prefix
from precedent.target.slot import Slot

__all__ = ["KVCache", "Slot", "TargetModel", "common_prefix"]
