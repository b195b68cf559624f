"""The order desk's database: made from a seed, held in memory, changed only through the desk's own operations.

Money is kept in cents; days are ISO dates counted from the fixed `TODAY`. Ids of returns, exchanges and refunds are
made from the ids they belong to, so that the same calls in any order leave the same rows.
"""

from __future__ import annotations

import datetime
import random
import sqlite3
from typing import Any

from precedent_demo.catalogue import (
    CARRIERS,
    CITIES,
    FIRST_NAMES,
    LAST_NAMES,
    PAYMENT_METHODS,
    PRODUCTS,
    STREETS,
)

TODAY = datetime.date(2026, 3, 16)
NUM_CUSTOMERS = 200
SCHEMA = """
CREATE TABLE customers (customer_id TEXT PRIMARY KEY, number INTEGER, name TEXT, email TEXT UNIQUE,
                        street TEXT, city TEXT, zip TEXT);
CREATE TABLE products (item_id TEXT PRIMARY KEY, product TEXT, option TEXT, price INTEGER, in_stock INTEGER);
CREATE TABLE orders (order_id TEXT PRIMARY KEY, customer_id TEXT REFERENCES customers, status TEXT, placed_on TEXT,
                     street TEXT, city TEXT, zip TEXT, cancel_reason TEXT);
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


def build(seed: int) -> sqlite3.Connection:
    """Open an in-memory database filled with about 500 orders of 200 customers; the seed fixes every row."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)  # the agent's tool node runs tools on threads
    connection.row_factory = sqlite3.Row
    connection.executescript(SCHEMA)
    rng = random.Random(f"order desk {seed}")
    _products(connection, rng)
    _customers(connection, rng)
    numbers = iter(rng.sample(range(10_000, 99_999), NUM_CUSTOMERS * 4))
    for customer in connection.execute("SELECT * FROM customers ORDER BY number").fetchall():
        for _ in range(rng.choice((1, 2, 3, 4))):
            _order(connection, rng, customer, f"W{next(numbers)}")
    connection.commit()
    return connection


def dump(connection: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table, sorted, to compare two databases."""
    return {
        table: sorted((tuple(row) for row in connection.execute(f"SELECT * FROM {table}")), key=repr)
        for table in TABLES
    }


def _products(connection: sqlite3.Connection, rng: random.Random) -> None:
    numbers = iter(rng.sample(range(1_000, 9_999), len(PRODUCTS) * 3))
    for product, price, options in PRODUCTS:
        for position, option in enumerate(options):
            stock = 0 if rng.random() < 0.1 else rng.randint(1, 40)
            row = (f"K{next(numbers)}", product, option, price + position * 250, stock)
            connection.execute("INSERT INTO products VALUES (?, ?, ?, ?, ?)", row)


def _customers(connection: sqlite3.Connection, rng: random.Random) -> None:
    first, last = rng.sample(FIRST_NAMES, len(FIRST_NAMES)), rng.sample(LAST_NAMES, len(LAST_NAMES))
    numbers = rng.sample(range(1_000, 9_999), NUM_CUSTOMERS)
    for i in range(NUM_CUSTOMERS):
        given, family = first[i % len(first)], last[(i + 2 * (i // len(first))) % len(last)]  # pairs are unique
        address = (f"{rng.randint(1, 99)} {rng.choice(STREETS)}", rng.choice(CITIES), str(rng.randint(10_000, 99_999)))
        row = (f"C{numbers[i]}", i, f"{given} {family}", f"{given}.{family}@example.com".lower(), *address)
        connection.execute("INSERT INTO customers VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _order(connection: sqlite3.Connection, rng: random.Random, customer: sqlite3.Row, order_id: str) -> None:
    status = rng.choices(("pending", "shipped", "delivered", "cancelled"), (32, 22, 34, 12))[0]
    age = {"pending": (0, 3), "shipped": (4, 8), "delivered": (9, 60), "cancelled": (2, 20)}[status]
    placed = -rng.randint(*age)
    row = (
        order_id,
        customer["customer_id"],
        status,
        day(placed),
        customer["street"],
        customer["city"],
        customer["zip"],
    )
    reason = "no longer needed" if status == "cancelled" else None
    connection.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, reason))
    chosen = rng.sample(range(len(PRODUCTS)), rng.choice((1, 1, 2, 3)))
    total = sum(_item(connection, order_id, PRODUCTS[p][0], rng) for p in chosen)
    method = rng.choice(PAYMENT_METHODS)
    connection.execute("INSERT INTO payments VALUES (?, ?, ?)", (order_id, method, total))
    if status == "cancelled":
        state, due = ("paid", placed + 5) if placed < -6 else ("processing", placed + 8)
        refund = (f"F{order_id[1:]}", order_id, total, method, state, day(due))
        connection.execute("INSERT INTO refunds VALUES (?, ?, ?, ?, ?, ?)", refund)
    elif status != "pending":
        _shipment(connection, rng, order_id, status, placed, customer["city"])


def _item(connection: sqlite3.Connection, order_id: str, product: str, rng: random.Random) -> int:
    options = connection.execute("SELECT item_id, price FROM products WHERE product = ?", (product,)).fetchall()
    item = rng.choice(options)
    row = (order_id, item["item_id"], item["price"])
    connection.execute("INSERT INTO items (order_id, item_id, price) VALUES (?, ?, ?)", row)
    return int(item["price"])


def _shipment(
    connection: sqlite3.Connection, rng: random.Random, order_id: str, status: str, placed: int, home: str
) -> None:
    delivered = placed + rng.randint(3, 7) if status == "delivered" else None
    location = home if delivered is not None else rng.choice(CITIES)
    due = delivered if delivered is not None else rng.randint(1, 4)
    number = f"T{rng.randint(1_000_000, 9_999_999)}"
    row = (order_id, rng.choice(CARRIERS), number, location, day(placed + 1), day(due))
    arrived = day(delivered) if delivered is not None else None
    connection.execute("INSERT INTO tracking VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, arrived))
