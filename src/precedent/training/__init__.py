"""Trains a draft model for a target: a few layers that learn the target's law on the target's own outputs.

`distil.train_draft` is the way in (`precedent train-draft`), `measure.measure` the report (`precedent measure-draft`).
"""
