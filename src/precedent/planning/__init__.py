"""Which candidates are worth verifying: their acceptance probabilities, the cost of a step, and the tree that pays off.

Numbers in, a plan out: does not load torch and calls no model.
"""
