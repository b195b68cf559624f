"""The drafters that sample from a model: a smaller one with the target's tokenizer, or the target's own MTP head.

The only drafters that need torch.
"""
