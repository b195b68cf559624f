"""The embedded store: records, rows, and one SQLite file that is the truth of the cache.

May not import an index, an embedder or a snapshot: those are made from what stands here.
"""
