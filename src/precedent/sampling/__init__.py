"""From logits to probabilities: random numbers, seeds, constraints, and the target's rows over a candidate tree.

Works on tensors alone; must not import a model, a drafter or verification.
"""
