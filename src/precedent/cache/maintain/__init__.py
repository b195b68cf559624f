"""Whole caches: verify, repair, export, import, fill.

Used by the commands of `precedent cache` and never by a running request.
"""
