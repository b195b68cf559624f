"""The embedded store: records, rows, and one SQLite file that is the cache's source of truth.

May not import the snapshot, the search or `maintain`: those build on this package.
"""
