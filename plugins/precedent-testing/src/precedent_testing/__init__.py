"""Test support for your tests and ours: contract classes, fakes, tiny real models, exact output distributions."""
