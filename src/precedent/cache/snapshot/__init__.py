"""The tokens of a tenant's completions as sealed, memory-mapped segments: what drafting reads instead of the rows.

Can be deleted at any time; believed only where it agrees with the store.
"""
