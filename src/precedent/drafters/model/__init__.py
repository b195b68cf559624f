"""The drafters that sample from a model: a smaller one with the target's tokenizer, or the target's first layers.

The only drafters of core that need torch.
"""
