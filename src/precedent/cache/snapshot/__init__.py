"""The tokens of a tenant's completions as sealed segments on disk, which drafting reads instead of the rows.

Segments can be deleted at any time: they count only where they agree with the store. May import only the store.
"""
