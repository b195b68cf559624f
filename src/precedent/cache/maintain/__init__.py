"""Operations on whole caches: verify, export, import, fill.

It may import the store, the snapshot and the search; none of them may import it, and no running request calls it.
"""
