"""Draft models trained for a target: `precedent train-draft` and `precedent measure-draft`."""
