"""Which candidates are worth verifying: their acceptance probabilities, the cost of a step, and the tree that pays off.

Numbers in, a plan out: does not load torch and calls no model.
"""

from precedent.planning.planner import Limits, Plan, Planner

__all__ = ["Limits", "Plan", "Planner"]
