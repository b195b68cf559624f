"""Fifty tenants with names that are easily mixed up find their own records and never another's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.quick_store import quick_store

from precedent.cache import Selection, SQLiteStore, verify_cache
from precedent.cache.index import SimilarityIndex
from precedent_testing.store_contract import EMBEDDER, completion, unit_vector

TRICKY = (
    *("a", "A", "a ", " a", "a/b", "../a", "a%", "a_", "a'", 'a"', "a;b", "ä", "a\u0308"),
    *("tok", "default", "*", "NULL"),
)


@dataclass
class Tenants:
    """What each tenant must find, kept beside the store."""

    store: SQLiteStore
    index: SimilarityIndex
    choose: random.Random
    names: list[str]
    held: dict[str, dict[int, tuple[tuple[int, ...], int]]] = field(default_factory=dict)
    operations: int = 0

    def step(self) -> None:
        """One operation on one tenant, and the same question asked for another one."""
        tenant, other = self.choose.sample(self.names, 2)
        self.operations += 1
        actions = (self.insert, self.read, self.recall, self.list, self.search, self.forget_one, self.forget_tenant)
        self.choose.choices(actions, (45, 15, 20, 9, 9, 1.5, 0.1))[0](tenant, other)

    def insert(self, tenant: str, other: str) -> None:
        number = self.choose.randrange(60)  # tenants store the same things all the time
        new = completion(number, number + 1, tenant=tenant, query=f"shared {number}", text=f"text {number}.")
        row_id = self.store.insert(new, unit_vector(number), EMBEDDER)
        self.held.setdefault(tenant, {})[row_id] = (new.token_ids, number)
        assert all(row_id not in held for name, held in self.held.items() if name != tenant)

    def read(self, tenant: str, other: str) -> None:
        for name in (tenant, other):
            found = {one.id: one.token_ids for one in self.store.since(name, "tok", 0)}
            assert found == {row_id: tokens for row_id, (tokens, _) in self.held.get(name, {}).items()}

    def recall(self, tenant: str, other: str) -> None:
        number = self.choose.randrange(60)
        for name in (tenant, other):
            hits = {
                hit.completion_id: hit.similarity for hit in self.index.search(unit_vector(number), name, "tok", 1000)
            }
            exact = {i: float(unit_vector(n) @ unit_vector(number)) for i, (_, n) in self.held.get(name, {}).items()}
            assert hits == pytest.approx(exact, abs=1e-5)

    def list(self, tenant: str, other: str) -> None:
        for name in (tenant, other):
            assert {one.id for one in self.store.list(Selection(tenant=name))} == set(self.held.get(name, {}))

    def search(self, tenant: str, other: str) -> None:
        number = self.choose.randrange(60)
        for name in (tenant, other):
            found = {one.id for one in self.store.list(Selection(tenant=name, containing=f"TEXT {number}."))}
            assert found == {i for i, (_, n) in self.held.get(name, {}).items() if n == number}

    def forget_one(self, tenant: str, other: str) -> None:
        """By the id of another tenant nothing goes; by its own, that one."""
        mine, theirs = self.held.get(tenant, {}), self.held.get(other, {})
        if theirs:
            assert self.store.forget(Selection(tenant=tenant, ids=(self.choose.choice(list(theirs)),))) == 0
        if mine:
            row_id = self.choose.choice(list(mine))
            assert self.store.forget(Selection(tenant=tenant, ids=(row_id,))) == 1
            del mine[row_id]

    def forget_tenant(self, tenant: str, other: str) -> None:
        assert self.store.forget(Selection(tenant=tenant)) == len(self.held.pop(tenant, {}))


def fuzz_tenants(path: Path, operations: int) -> int:
    names = [*TRICKY, *(f"tenant {n}" for n in range(50 - len(TRICKY)))]
    store = quick_store(path)
    tenants = Tenants(store, SimilarityIndex(store), random.Random(3), names)
    while tenants.operations < operations:
        tenants.step()
    for name in names:
        tenants.read(name, name)
    held = {name: len(records) for name, records in tenants.held.items() if records}
    assert {one.tenant: one.records for one in store.stats().tenants} == held
    store.close()
    assert verify_cache(path).findings == ()
    print({"operations": tenants.operations, "tenants": len(names)})
    return tenants.operations


@pytest.mark.parametrize("operations", [1_500, pytest.param(100_000, marks=pytest.mark.stress)])
def test_fifty_tenants_find_their_own_and_never_anothers(tmp_path, operations):
    assert fuzz_tenants(tmp_path, operations) == operations
