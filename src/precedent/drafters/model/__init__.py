"""The drafter that samples from a smaller model with the target's tokenizer.

The only drafter that needs torch and a model of its own.
"""
