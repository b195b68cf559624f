"""`precedent serve`: what it refuses before it loads anything, where its options come from, and its access log."""

from __future__ import annotations
