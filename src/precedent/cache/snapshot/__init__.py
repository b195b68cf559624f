"""The tokens of a tenant's completions as sealed, memory-mapped segments: what drafting reads instead of the rows.

Can be deleted at any time, since it is believed only where it agrees with the store; may import the store alone.
"""
