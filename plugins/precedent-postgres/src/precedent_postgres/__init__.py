"""A completion store in PostgreSQL: once installed, `SpeculationCache.open("postgresql://user@host/database")`."""

from precedent_postgres.store import PostgresStore, open_store

__all__ = ["PostgresStore", "open_store"]
