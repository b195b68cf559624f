"""Whole caches: verify, repair, export, import, fill.

May import the store, the snapshot and the search; none of them may import it, and no running request calls it.
"""
