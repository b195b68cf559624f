"""Encoder-decoder targets (T5, BART and their families): the prompt goes to the encoder, trees to the decoder."""
