"""Which candidates are worth verifying: what they are believed to bring, what a step costs, and the tree that pays.

Numbers in, a plan out: loads no torch and calls no model.
"""
