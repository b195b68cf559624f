"""The embedded store: records, rows, and one SQLite file that is the truth of the cache.

May not import the snapshot, the search or what maintains a cache: those are made from what stands here.
"""
