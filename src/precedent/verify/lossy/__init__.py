"""Modes that may leave the target's distribution, each asked for by name; every verdict says what it spent.

Nothing lossless imports this room: `precedent.decoding` loads it for a request that names a `lossy_` mode.
"""
