"""The order desk: the operations that look up and change orders, and the policies that restrict them."""

from __future__ import annotations

import datetime
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from precedent.errors import PrecedentError
from precedent_demo import database
from precedent_demo.database import RETURN_WINDOW_DAYS, TODAY, day

CANCEL_REASONS = ("ordered by mistake", "no longer needed")


class PolicyError(PrecedentError):
    """The order desk refuses an operation; the tool answers with the error's text."""


class OrderDesk:
    """An open order database and its operations; each operation is one transaction and thread-safe."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()

    def copy(self) -> OrderDesk:
        """An independent desk with the same rows."""
        connection = sqlite3.connect(":memory:", check_same_thread=False)
        connection.row_factory = sqlite3.Row
        with self._lock:
            self._connection.backup(connection)
        return OrderDesk(connection)

    def state(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table, sorted; equal for desks with equal contents."""
        with self._lock:
            return database.dump(self._connection)

    def rows(self, query: str, *values: str) -> list[sqlite3.Row]:
        """Run a SELECT; used to choose requests, and by tests."""
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    @property
    def num_changes(self) -> int:
        """How many rows were written since the database was opened."""
        return self._connection.total_changes

    def close(self) -> None:
        """Close the database; the desk cannot be used afterwards."""
        self._connection.close()

    def find_customer(self, email: str) -> dict[str, Any]:
        """The customer with this e-mail address. Raises PolicyError if there is none."""
        query = "SELECT * FROM customers WHERE email = ?"
        found = self._one("no customer has this email", query, email.strip().lower())
        return {"customer": found["customer_id"], "name": found["name"], "address": found["address"]}

    def list_orders(self, customer: str) -> dict[str, Any]:
        """The orders of a customer, oldest first. Raises PolicyError if there is no such customer."""
        query = "SELECT 1 FROM customers WHERE customer_id = ?"
        self._one(f"no customer has the number {customer}", query, customer)
        query = "SELECT order_id, status FROM orders WHERE customer_id = ? ORDER BY placed_on, order_id"
        shown = []
        for order, status in self.rows(query, customer):
            items = ", ".join(item["product"] for item in self._items(order))
            shown.append({"order": order, "status": status, "items": items})
        return {"orders": shown}

    def get_order(self, order: str) -> dict[str, Any]:
        """Status, items, total and address of an order. Raises PolicyError if there is no such order."""
        found, rows = self._order(order), self._items(order)
        items = [{"item": row["item_id"], "name": _name(row), "price": money(row["price"])} for row in rows]
        total = self._payment(order)["amount"]
        shown = {"status": found["status"], "items": items, "total": money(total), "address": found["address"]}
        return shown | ({"returns": self._return_window(order)} if found["status"] == "delivered" else {})

    def track_shipment(self, order: str) -> dict[str, Any]:
        """Carrier, place and date of a shipped or delivered order. Raises PolicyError for other orders."""
        status = self._order(order)["status"]
        refusal = f"order {order} is {status} and has no shipment"
        found = self._one(refusal, "SELECT * FROM tracking WHERE order_id = ?", order)
        shown = {"status": status, "carrier": found["carrier"], "place": found["location"]}
        arrival = ("delivered", "delivered_on") if status == "delivered" else ("due", "due_on")
        return shown | {arrival[0]: spoken(found[arrival[1]])}

    def get_refund_status(self, order: str) -> dict[str, Any]:
        """The refunds of an order. Raises PolicyError if there are none."""
        status = self._order(order)["status"]
        found = self.rows("SELECT * FROM refunds WHERE order_id = ? ORDER BY refund_id", order)
        if not found:
            raise PolicyError(f"order {order} is {status} and has no refund")
        refunds = []
        for row in found:
            amount, due = money(row["amount"]), spoken(row["due_on"])
            refunds.append({"amount": amount, "status": row["status"], "method": row["method"], "due": due})
        return refunds[0] if len(refunds) == 1 else {"refunds": refunds}

    def change_address(self, order: str, address: str) -> dict[str, Any]:
        """Send a pending order to another address. Raises PolicyError if it is no longer pending."""
        with self._transaction() as connection:
            self._demand(order, "pending", "its address cannot be changed")
            connection.execute("UPDATE orders SET address = ? WHERE order_id = ?", (address, order))
        return {"status": "pending", "address": address}

    def cancel_order(self, order: str, reason: str) -> dict[str, Any]:
        """Cancel a pending order and refund it. Raises PolicyError if it is not pending, or for an unknown reason."""
        if reason not in CANCEL_REASONS:
            raise PolicyError(f"reason must be one of: {', '.join(CANCEL_REASONS)}")
        with self._transaction() as connection:
            self._demand(order, "pending", "it cannot be cancelled")
            query = "UPDATE orders SET status = 'cancelled', cancel_reason = ? WHERE order_id = ?"
            connection.execute(query, (reason, order))
            paid = self._payment(order)
            due = self._refund(f"F{order[1:]}", order, paid["amount"])
        return {"status": "cancelled", "refund": money(paid["amount"]), "method": paid["method"], "due": spoken(due)}

    def request_return(self, order: str, item: str) -> dict[str, Any]:
        """Take back one item of a delivered order within 30 days. Raises PolicyError otherwise."""
        with self._transaction() as connection:
            row = self._returnable(order, item)
            self._open_return(connection, order, item, "return", None)
            self._refund(f"F{order[1:]}-{item[1:]}", order, row["price"])
        return {"return": _return_id(order, item), "refund": money(row["price"]), "send_by": spoken(day(14))}

    def exchange_item(self, order: str, item: str, option: str) -> dict[str, Any]:
        """Swap an item of a delivered order for another option of the same product. Raises PolicyError otherwise."""
        with self._transaction() as connection:
            new = self._replacement(self._returnable(order, item), option)
            self._open_return(connection, order, item, "exchange", new["item_id"])
            connection.execute("UPDATE products SET in_stock = in_stock - 1 WHERE item_id = ?", (new["item_id"],))
        return {"exchange": _return_id(order, item), "new_item": _name(new), "send_by": spoken(day(14))}

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._connection:
            yield self._connection

    def _one(self, refusal: str, query: str, value: str) -> sqlite3.Row:
        found = self.rows(query, value)
        if not found:
            raise PolicyError(refusal)
        return found[0]

    def _order(self, order: str) -> sqlite3.Row:
        return self._one(f"no order has the number {order}", "SELECT * FROM orders WHERE order_id = ?", order)

    def _payment(self, order: str) -> sqlite3.Row:
        return self.rows("SELECT * FROM payments WHERE order_id = ?", order)[0]

    def _items(self, order: str) -> list[sqlite3.Row]:
        query = "SELECT items.*, product, option FROM items JOIN products USING (item_id) WHERE order_id = ?"
        return self.rows(f"{query} ORDER BY item_id", order)

    def _demand(self, order: str, status: str, refusal: str) -> None:
        found = self._order(order)["status"]
        if found != status:
            raise PolicyError(f"order {order} is {found}, so {refusal}")

    def _delivered_on(self, order: str) -> str:
        query = "SELECT delivered_on FROM tracking WHERE order_id = ?"
        return str(self.rows(query, order)[0]["delivered_on"])

    def _return_window(self, order: str) -> str:
        last = datetime.date.fromisoformat(self._delivered_on(order)) + datetime.timedelta(days=RETURN_WINDOW_DAYS)
        return f"{'open until' if last >= TODAY else 'closed on'} {spoken(last.isoformat())}"

    def _returnable(self, order: str, item: str) -> sqlite3.Row:
        self._demand(order, "delivered", "nothing of it can be sent back")
        row = next((row for row in self._items(order) if row["item_id"] == item), None)
        if row is None:
            raise PolicyError(f"order {order} has no item {item}")
        if row["state"] != "ordered":
            raise PolicyError(f"item {item} is already in a {row['state']}")
        if self._delivered_on(order) < day(-RETURN_WINDOW_DAYS):
            raise PolicyError(f"order {order} was delivered more than {RETURN_WINDOW_DAYS} days ago")
        return row

    def _replacement(self, item: sqlite3.Row, option: str) -> sqlite3.Row:
        found = self.rows("SELECT * FROM products WHERE product = ? AND option = ?", item["product"], option)
        if not found or found[0]["item_id"] == item["item_id"]:
            raise PolicyError(f"{option} is not another option of the {item['product']}")
        if found[0]["in_stock"] < 1:
            raise PolicyError(f"{_name(found[0])} is out of stock")
        return found[0]

    def _open_return(
        self, connection: sqlite3.Connection, order: str, item: str, kind: str, new_item: str | None
    ) -> None:
        row = (_return_id(order, item), order, item, kind, new_item, "open", day(14))
        connection.execute("INSERT INTO returns VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        query = "UPDATE items SET state = ? WHERE order_id = ? AND item_id = ?"
        connection.execute(query, (kind, order, item))

    def _refund(self, refund_id: str, order: str, amount: int) -> str:
        row = (refund_id, order, amount, self._payment(order)["method"], "processing", day(5))
        self._connection.execute("INSERT INTO refunds VALUES (?, ?, ?, ?, ?, ?)", row)
        return day(5)


def money(cents: int) -> str:
    """An amount as the desk writes it, for example "49.90"."""
    return f"{cents / 100:.2f}"


def spoken(iso_day: str) -> str:
    """A day as the desk writes it, for example "16 March"."""
    date = datetime.date.fromisoformat(iso_day)
    return f"{date.day} {date:%B}"


def _name(row: sqlite3.Row) -> str:
    return f"{row['product']}, {row['option']}"


def _return_id(order: str, item: str) -> str:
    return f"R{order[1:]}-{item[1:]}"
