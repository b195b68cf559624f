"""EAGLE-3 heads (2503.01840) that others trained and published, as draft models of their target.

A head reads the outputs of a few of the target's layers, fused, beside the embedding of the next token; behind the
committed text its own output takes their place.
"""
