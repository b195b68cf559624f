"""From logits to probabilities: random numbers, seeds, constraints, and the target's rows over a candidate tree.

May not import a model, a drafter or verification: it works on tensors that it is given.
"""
