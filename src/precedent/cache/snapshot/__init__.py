"""The tokens of a tenant's completions as sealed, memory-mapped segments, which drafting reads instead of the rows.

Segments can be deleted at any time: they count only where they agree with the store. May import only the store.
"""
