"""A completion store in PostgreSQL: `SpeculationCache.open("postgresql://user@host/database")` after installing it."""

from precedent_postgres.store import PostgresStore, open_store

__all__ = ["PostgresStore", "open_store"]
