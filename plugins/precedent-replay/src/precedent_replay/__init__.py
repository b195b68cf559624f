"""Measures what speculation would gain on recorded traces, without a model: recorded answers serve as the target's."""
