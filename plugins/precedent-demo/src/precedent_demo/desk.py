"""The order desk: what staff may look up and change, and the policies that bind them."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from precedent.errors import PrecedentError
from precedent_demo import database
from precedent_demo.database import day

CANCEL_REASONS = ("ordered by mistake", "no longer needed")
RETURN_WINDOW_DAYS = 30


class PolicyError(PrecedentError):
    """An operation that the order desk refuses; its text is what a tool answers."""


class OrderDesk:
    """One open order database and the operations on it; every operation is one transaction and thread-safe."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()

    @classmethod
    def from_seed(cls, seed: int) -> Self:
        """A desk with a freshly made database (about 500 orders)."""
        return cls(database.build(seed))

    def copy(self) -> OrderDesk:
        """A desk of its own with the same rows."""
        connection = sqlite3.connect(":memory:", check_same_thread=False)
        connection.row_factory = sqlite3.Row
        with self._lock:
            self._connection.backup(connection)
        return OrderDesk(connection)

    def state(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table, sorted; equal for desks on which the same things happened."""
        with self._lock:
            return database.dump(self._connection)

    def rows(self, query: str, *values: str) -> list[sqlite3.Row]:
        """Run a SELECT; how requests are chosen and tests look inside."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the database; the desk cannot be used afterwards."""
        self._connection.close()

    def find_customer(self, email: str) -> dict[str, Any]:
        """The customer with this e-mail address. Raises PolicyError when there is none."""
        found = self.rows("SELECT * FROM customers WHERE email = ?", email.strip().lower())
        if not found:
            raise PolicyError(f"no customer has the email {email}")
        return {"customer_id": found[0]["customer_id"], "name": found[0]["name"], "address": _address(found[0])}

    def list_orders(self, customer_id: str) -> dict[str, Any]:
        """The orders of a customer, oldest first. Raises PolicyError when there is no such customer."""
        if not self.rows("SELECT 1 FROM customers WHERE customer_id = ?", customer_id):
            raise PolicyError(f"no customer has the id {customer_id}")
        query = "SELECT order_id, status FROM orders WHERE customer_id = ? ORDER BY placed_on, order_id"
        return {"orders": [dict(row) for row in self.rows(query, customer_id)]}

    def get_order(self, order_id: str) -> dict[str, Any]:
        """Status, items, total and address of an order. Raises PolicyError when there is no such order."""
        order = self._order(order_id)
        items = [
            {"item_id": row["item_id"], "name": _name(row), "price": row["price"] / 100}
            for row in self._items(order_id)
        ]
        total = self.rows("SELECT amount FROM payments WHERE order_id = ?", order_id)[0]["amount"] / 100
        return {
            "order_id": order_id,
            "status": order["status"],
            "items": items,
            "total": total,
            "address": _address(order),
        }

    def track_shipment(self, order_id: str) -> dict[str, Any]:
        """Carrier, place and date of a shipped or delivered order. Raises PolicyError for other orders."""
        status = self._order(order_id)["status"]
        found = self.rows("SELECT * FROM tracking WHERE order_id = ?", order_id)
        if not found:
            raise PolicyError(f"order {order_id} is {status} and has no shipment")
        shown: dict[str, Any] = {"order_id": order_id, "status": status, "carrier": found[0]["carrier"]}
        if status == "delivered":
            return shown | {"delivered_on": found[0]["delivered_on"]}
        return shown | {"location": found[0]["location"], "due_on": found[0]["due_on"]}

    def get_refund_status(self, order_id: str) -> dict[str, Any]:
        """The refunds of an order. Raises PolicyError when it has none."""
        self._order(order_id)
        found = self.rows("SELECT * FROM refunds WHERE order_id = ? ORDER BY refund_id", order_id)
        if not found:
            raise PolicyError(f"order {order_id} has no refund")
        keys = ("refund_id", "status", "method", "due_on")
        refunds = [{"amount": row["amount"] / 100} | {key: row[key] for key in keys} for row in found]
        return {"order_id": order_id, **refunds[0]} if len(refunds) == 1 else {"order_id": order_id, "refunds": refunds}

    def change_address(self, order_id: str, street: str, city: str, zip: str) -> dict[str, Any]:
        """Send a pending order to another address. Raises PolicyError once it has left."""
        with self._transaction() as connection:
            self._demand(order_id, "pending", "its address cannot be changed")
            query = "UPDATE orders SET street = ?, city = ?, zip = ? WHERE order_id = ?"
            connection.execute(query, (street, city, zip, order_id))
        return {"order_id": order_id, "status": "pending", "new_address": _address(self._order(order_id))}

    def cancel_order(self, order_id: str, reason: str) -> dict[str, Any]:
        """Cancel a pending order and refund it. Raises PolicyError once it has left or for an unknown reason."""
        if reason not in CANCEL_REASONS:
            raise PolicyError(f"reason must be one of: {', '.join(CANCEL_REASONS)}")
        with self._transaction() as connection:
            self._demand(order_id, "pending", "it cannot be cancelled")
            query = "UPDATE orders SET status = 'cancelled', cancel_reason = ? WHERE order_id = ?"
            connection.execute(query, (reason, order_id))
            paid = self.rows("SELECT amount, method FROM payments WHERE order_id = ?", order_id)[0]
            due = self._refund(f"F{order_id[1:]}", order_id, paid["amount"])
        refund = {"refund": paid["amount"] / 100, "method": paid["method"], "refund_due": due}
        return {"order_id": order_id, "status": "cancelled", **refund}

    def request_return(self, order_id: str, item_id: str) -> dict[str, Any]:
        """Take back one item of a delivered order within 30 days. Raises PolicyError otherwise."""
        with self._transaction() as connection:
            item = self._returnable(order_id, item_id)
            self._open_return(connection, order_id, item_id, "return", None)
            self._refund(f"F{order_id[1:]}-{item_id[1:]}", order_id, item["price"])
        shown = {"order_id": order_id, "item": _name(item), "refund": item["price"] / 100}
        return {"return_id": _return_id(order_id, item_id), **shown, "send_by": day(14)}

    def exchange_item(self, order_id: str, item_id: str, new_item_id: str) -> dict[str, Any]:
        """Swap an item of a delivered order for another option of the same product. Raises PolicyError otherwise."""
        with self._transaction() as connection:
            item = self._returnable(order_id, item_id)
            new = self._replacement(item, new_item_id)
            self._open_return(connection, order_id, item_id, "exchange", new_item_id)
            connection.execute("UPDATE products SET in_stock = in_stock - 1 WHERE item_id = ?", (new_item_id,))
        shown = {"order_id": order_id, "old_item": _name(item), "new_item": _name(new)}
        difference = (new["price"] - item["price"]) / 100
        return {"exchange_id": _return_id(order_id, item_id), **shown, "to_pay": difference, "send_by": day(14)}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._connection:
            yield self._connection

    def _order(self, order_id: str) -> sqlite3.Row:
        found = self.rows("SELECT * FROM orders WHERE order_id = ?", order_id)
        if not found:
            raise PolicyError(f"no order has the id {order_id}")
        return found[0]

    def _items(self, order_id: str) -> list[sqlite3.Row]:
        query = "SELECT items.*, product, option FROM items JOIN products USING (item_id) WHERE order_id = ?"
        return self.rows(f"{query} ORDER BY item_id", order_id)

    def _demand(self, order_id: str, status: str, refusal: str) -> None:
        found = self._order(order_id)["status"]
        if found != status:
            raise PolicyError(f"order {order_id} is {found}, so {refusal}")

    def _returnable(self, order_id: str, item_id: str) -> sqlite3.Row:
        self._demand(order_id, "delivered", "nothing of it can be sent back")
        item = next((row for row in self._items(order_id) if row["item_id"] == item_id), None)
        if item is None:
            raise PolicyError(f"order {order_id} has no item {item_id}")
        if item["state"] != "ordered":
            raise PolicyError(f"item {item_id} is already in a {item['state']}")
        delivered = self.rows("SELECT delivered_on FROM tracking WHERE order_id = ?", order_id)[0]["delivered_on"]
        if delivered < day(-RETURN_WINDOW_DAYS):
            raise PolicyError(f"order {order_id} was delivered on {delivered}, more than {RETURN_WINDOW_DAYS} days ago")
        return item

    def _replacement(self, item: sqlite3.Row, new_item_id: str) -> sqlite3.Row:
        found = self.rows("SELECT * FROM products WHERE item_id = ?", new_item_id)
        if not found or found[0]["product"] != item["product"] or new_item_id == item["item_id"]:
            raise PolicyError(f"{new_item_id} is not another option of the {item['product']}")
        if found[0]["in_stock"] < 1:
            raise PolicyError(f"{_name(found[0])} is out of stock")
        return found[0]

    def _open_return(
        self, connection: sqlite3.Connection, order_id: str, item_id: str, kind: str, new_item_id: str | None
    ) -> None:
        row = (_return_id(order_id, item_id), order_id, item_id, kind, new_item_id, "open", day(14))
        connection.execute("INSERT INTO returns VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        query = "UPDATE items SET state = ? WHERE order_id = ? AND item_id = ?"
        connection.execute(query, (kind, order_id, item_id))

    def _refund(self, refund_id: str, order_id: str, amount: int) -> str:
        method = self.rows("SELECT method FROM payments WHERE order_id = ?", order_id)[0]["method"]
        row = (refund_id, order_id, amount, method, "processing", day(5))
        self._connection.execute("INSERT INTO refunds VALUES (?, ?, ?, ?, ?, ?)", row)
        return day(5)


def _address(row: sqlite3.Row) -> str:
    return f"{row['street']}, {row['city']} {row['zip']}"


def _name(row: sqlite3.Row) -> str:
    return f"{row['product']}, {row['option']}"


def _return_id(order_id: str, item_id: str) -> str:
    return f"R{order_id[1:]}-{item_id[1:]}"
