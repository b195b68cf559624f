"""The order desk's database: generated from a seed, held in memory, changed only through the desk's operations.

Money is in cents; days are ISO dates relative to the fixed `TODAY`. The ids of returns, exchanges and refunds derive
from those of their orders and items, so that the same calls leave the same rows in any order.
"""

from __future__ import annotations

import datetime
import random
import sqlite3
from collections.abc import Iterator
from typing import Any

from precedent.errors import ConfigError
from precedent_demo.catalogue import CARRIERS, CATALOGUES, PAYMENT_METHODS, Catalogue, Product

TODAY = datetime.date(2026, 3, 16)
NUM_CUSTOMERS = 200
RETURN_WINDOW_DAYS = 30
HELD_OUT_REMAINDER, ID_DIVISOR = 3, 7
"""Only held-out databases use ids with this remainder, so that none of their ids occurs in training."""

SCHEMA = """
CREATE TABLE customers (customer_id TEXT PRIMARY KEY, number INTEGER, name TEXT, email TEXT UNIQUE, address TEXT);
CREATE TABLE products (item_id TEXT PRIMARY KEY, product TEXT, option TEXT, price INTEGER, in_stock INTEGER);
CREATE TABLE orders (order_id TEXT PRIMARY KEY, customer_id TEXT REFERENCES customers, status TEXT, placed_on TEXT,
                     address TEXT, cancel_reason TEXT);
CREATE TABLE items (order_id TEXT REFERENCES orders, item_id TEXT REFERENCES products, price INTEGER,
                    state TEXT DEFAULT 'ordered', PRIMARY KEY (order_id, item_id));
CREATE TABLE payments (order_id TEXT PRIMARY KEY REFERENCES orders, method TEXT, amount INTEGER);
CREATE TABLE refunds (refund_id TEXT PRIMARY KEY, order_id TEXT REFERENCES orders, amount INTEGER, method TEXT,
                      status TEXT, due_on TEXT);
CREATE TABLE returns (return_id TEXT PRIMARY KEY, order_id TEXT, item_id TEXT, kind TEXT, new_item_id TEXT,
                      status TEXT, send_by TEXT);
CREATE TABLE tracking (order_id TEXT PRIMARY KEY REFERENCES orders, carrier TEXT, number TEXT, location TEXT,
                       shipped_on TEXT, due_on TEXT, delivered_on TEXT);
"""
TABLES = ("customers", "products", "orders", "items", "payments", "refunds", "returns", "tracking")


def day(offset: int) -> str:
    """The ISO date `offset` days after `TODAY`."""
    return (TODAY + datetime.timedelta(days=offset)).isoformat()


def build(seed: int, split: str = "held-out") -> sqlite3.Connection:
    """Open an in-memory database with about 400 orders of 200 customers; seed and split determine every row.

    Raises ConfigError for a split other than "held-out" and "train".
    """
    if split not in CATALOGUES:
        raise ConfigError(f"there is no split {split!r}; choose held-out or train")
    connection = sqlite3.connect(":memory:", check_same_thread=False)  # the agent's tool node runs tools on threads
    connection.row_factory = sqlite3.Row
    connection.executescript(SCHEMA)
    _Builder(connection, random.Random(f"order desk {split} {seed}"), split).fill()
    connection.commit()
    return connection


def dump(connection: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, sorted, for comparing two databases."""
    return {
        table: sorted((tuple(row) for row in connection.execute(f"SELECT * FROM {table}")), key=repr)
        for table in TABLES
    }


def new_address(rng: random.Random, words: Catalogue) -> str:
    """An address on one line: number and street, city and zip code."""
    return f"{rng.randint(1, 99)} {rng.choice(words.streets)}, {rng.choice(words.cities)} {rng.randint(10_000, 99_999)}"


class _Builder:
    def __init__(self, connection: sqlite3.Connection, rng: random.Random, split: str) -> None:
        self._connection, self._rng, self._split = connection, rng, split
        self._words = CATALOGUES[split]

    def fill(self) -> None:
        self._products()
        self._customers()
        numbers = self._numbers(10_000, 99_999, NUM_CUSTOMERS * 3)
        for customer in self._connection.execute("SELECT * FROM customers ORDER BY number").fetchall():
            products = self._rng.sample(
                self._words.products, 6
            )  # a customer buys nothing twice: a product names an order
            for _ in range(self._rng.choice((1, 2, 2, 3))):
                bought = [products.pop() for _ in range(self._rng.choice((1, 1, 2)))]
                self._order(customer, f"W{next(numbers)}", bought)

    def _numbers(self, low: int, high: int, count: int) -> Iterator[int]:
        held_out = self._split == "held-out"
        usable = [n for n in range(low, high) if (n % ID_DIVISOR == HELD_OUT_REMAINDER) == held_out]
        return iter(self._rng.sample(usable, count))

    def _insert(self, table: str, *row: Any) -> None:
        self._connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def _products(self) -> None:
        numbers = self._numbers(1_000, 9_999, len(self._words.products) * 3)
        for product, price, options in self._words.products:
            for option in options:
                stock = 0 if self._rng.random() < 0.15 else self._rng.randint(1, 40)
                self._insert("products", f"K{next(numbers)}", product, option, price, stock)

    def _customers(self) -> None:
        """Insert customers; walking both name lists keeps pairs unique and combines even positions only with even."""
        words, rng = self._words, self._rng
        first, last = (rng.sample(names, len(names) // 2 * 2) for names in (words.first_names, words.last_names))
        numbers = self._numbers(1_000, 9_999, NUM_CUSTOMERS)
        for i in range(NUM_CUSTOMERS):
            given, family = first[i % len(first)], last[(i + 2 * (i // len(first))) % len(last)]
            email = self._email(given.lower(), family.lower())
            self._insert("customers", f"C{next(numbers)}", i, f"{given} {family}", email, new_address(rng, words))

    def _email(self, given: str, family: str) -> str:
        """An address in one of several styles; each contains the whole family name, so that no address occurs twice."""
        form = self._rng.choice(("{g}.{f}", "{g}.{f}", "{f}.{g}", "{g}{f}{n}", "{g}_{f}", "{f}{n}.{g}", "{g}-{f}{n}"))
        mailbox = form.format(g=given, f=family, n=self._rng.randint(1, 99))
        return f"{mailbox}@{self._rng.choice(self._words.mail_hosts)}"

    def _order(self, customer: sqlite3.Row, order_id: str, bought: list[Product]) -> None:
        rng = self._rng
        status = rng.choices(("pending", "shipped", "delivered", "cancelled"), (34, 20, 34, 12))[0]
        age = {"pending": (0, 3), "shipped": (4, 8), "delivered": (9, 60), "cancelled": (2, 20)}[status]
        placed = -rng.randint(*age)
        reason = "no longer needed" if status == "cancelled" else None
        self._insert("orders", order_id, customer["customer_id"], status, day(placed), customer["address"], reason)
        total = sum(self._item(order_id, product[0]) for product in bought)
        method = rng.choice(PAYMENT_METHODS)
        self._insert("payments", order_id, method, total)
        if status == "cancelled":
            state, due = ("paid", placed + 5) if placed < -6 else ("processing", placed + 8)
            self._insert("refunds", f"F{order_id[1:]}", order_id, total, method, state, day(due))
        elif status != "pending":
            self._shipment(order_id, status, placed, customer["address"])

    def _item(self, order_id: str, product: str) -> int:
        query = "SELECT item_id, price FROM products WHERE product = ?"
        item = self._rng.choice(self._connection.execute(query, (product,)).fetchall())
        self._insert("items", order_id, item["item_id"], item["price"], "ordered")
        return int(item["price"])

    def _shipment(self, order_id: str, status: str, placed: int, address: str) -> None:
        rng = self._rng
        delivered = placed + rng.randint(3, 7) if status == "delivered" else None
        home = address.rsplit(", ", 1)[1].rsplit(" ", 1)[0]
        location = home if delivered is not None else rng.choice(self._words.cities)
        due = delivered if delivered is not None else rng.randint(1, 4)
        number = f"T{rng.randint(1_000_000, 9_999_999)}"
        arrived = day(delivered) if delivered is not None else None
        self._insert("tracking", order_id, rng.choice(CARRIERS), number, location, day(placed + 1), day(due), arrived)
