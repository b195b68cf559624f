"""Heads for multi-token prediction (MTP) that a checkpoint carries beside its model, as draft models of their target.

DeepSeek-V3 (2412.19437, section 2.2) trains a layer that predicts the token after the next one, from the target's
hidden state and the next token's embedding. transformers drops its weights; this package reads them.
"""
