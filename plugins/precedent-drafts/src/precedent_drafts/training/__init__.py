"""Trains a draft model for a target: a few layers that learn the target's distribution on the target's own outputs.

`training.Training` trains (`precedent train-draft`), `measure.Measurement` reports (`precedent measure-draft`).
"""
