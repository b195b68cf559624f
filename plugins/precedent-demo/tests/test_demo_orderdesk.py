"""The order desk of the demo: its database, tools and policies. The expert's conversations use all of them as well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from precedent_demo import OrderDesk, make_database, make_tools
from precedent_demo.catalogue import HELD_OUT, TRAIN
from precedent_demo.database import RETURN_WINDOW_DAYS, day


@pytest.fixture(scope="module")
def template() -> OrderDesk:
    return make_database(seed=0)


@pytest.fixture
def desk(template: OrderDesk) -> OrderDesk:
    return template.copy()


def call(desk: OrderDesk, tool: str, **arguments: str) -> dict[str, Any]:
    answer = {one.name: one for one in make_tools(desk)}[tool].invoke(arguments)
    result: dict[str, Any] = json.loads(answer)
    return result


def order_with(desk: OrderDesk, status: str) -> str:
    return str(desk.rows("SELECT order_id FROM orders WHERE status = ? ORDER BY order_id", status)[0]["order_id"])


def delivered_item(desk: OrderDesk, comparison: str = ">=") -> dict[str, str]:
    """An item that was delivered within the time for returns, or with `<` before it."""
    query = f"""SELECT order_id, item_id FROM tracking JOIN items USING (order_id)
                WHERE delivered_on {comparison} ? ORDER BY 1, 2"""
    found = desk.rows(query, day(-RETURN_WINDOW_DAYS))[0]
    return {"order": found["order_id"], "item": found["item_id"]}


def options_of(desk: OrderDesk, item: str) -> list[Any]:
    """Rows of the item's product, its own among them."""
    return desk.rows("SELECT * FROM products WHERE product = (SELECT product FROM products WHERE item_id = ?)", item)


def test_seed_fixes_every_row_and_training_and_held_out_databases_share_no_id_and_no_name(template: OrderDesk) -> None:
    assert make_database(0).state() == template.state() != make_database(1).state()
    train = make_database(0, split="train")
    for table, column in (("customers", "customer_id"), ("orders", "order_id"), ("products", "item_id")):
        ids = [{row[column] for row in desk.rows(f"SELECT {column} FROM {table}")} for desk in (template, train)]
        assert min(len(found) for found in ids) >= 60
        assert not ids[0] & ids[1]
    for words in ("first_names", "last_names", "streets", "cities", "mail_hosts"):
        assert not set(getattr(HELD_OUT, words)) & set(getattr(TRAIN, words))
    assert len({p[0] for p in HELD_OUT.products} - {p[0] for p in TRAIN.products}) == 10


def test_payments_equal_the_items_and_every_shipped_order_is_tracked(template: OrderDesk) -> None:
    wrong = """SELECT 1 FROM payments
               WHERE amount != (SELECT sum(price) FROM items WHERE items.order_id = payments.order_id)"""
    untracked = """SELECT 1 FROM orders LEFT JOIN tracking USING (order_id)
                   WHERE (status IN ('shipped', 'delivered')) != (carrier IS NOT NULL)"""
    assert not template.rows(wrong)
    assert not template.rows(untracked)


def test_what_is_unknown_or_comes_too_late_is_refused_and_changes_nothing(desk: OrderDesk, template: OrderDesk) -> None:
    shipped, pending, delivered = (order_with(desk, status) for status in ("shipped", "pending", "delivered"))
    item, late = delivered_item(desk), delivered_item(desk, "<")
    same = next(row["option"] for row in options_of(desk, item["item"]) if row["item_id"] == item["item"])
    refused: list[tuple[str, dict[str, str], str]] = [
        ("find_customer", {"email": "nobody@example.com"}, "no customer"),
        ("list_orders", {"customer": "C0"}, "no customer"),
        *((name, {"order": "W0"}, "no order") for name in ("get_order", "track_shipment", "get_refund_status")),
        ("track_shipment", {"order": pending}, "no shipment"),
        ("change_address", {"order": shipped, "address": "7 Elm Avenue, Ashby 20001"}, "shipped"),
        ("cancel_order", {"order": delivered, "reason": "no longer needed"}, "delivered"),
        ("cancel_order", {"order": pending, "reason": "because"}, "reason"),
        ("change_address", {"order": pending}, "address"),
        ("request_return", {"order": pending, "item": item["item"]}, "is pending"),
        ("request_return", late, "more than 30 days"),
        ("request_return", {**item, "item": "K0"}, "no item"),
        *(("exchange_item", {**item, "option": new}, "not another option") for new in ("striped", same)),
    ]
    for tool, arguments, said in refused:
        error = call(desk, tool, **arguments)["error"]
        assert said in error
        assert len(error) < 120
    assert desk.state() == template.state()


def test_a_pending_order_can_be_cancelled_once_and_is_refunded(desk: OrderDesk) -> None:
    order_id = order_with(desk, "pending")
    total = call(desk, "get_order", order=order_id)["total"]
    assert call(desk, "cancel_order", order=order_id, reason="ordered by mistake")["refund"] == total
    assert call(desk, "get_order", order=order_id)["status"] == "cancelled"
    assert call(desk, "get_refund_status", order=order_id)["amount"] == total
    assert "is cancelled" in call(desk, "cancel_order", order=order_id, reason="ordered by mistake")["error"]


def test_a_delivered_item_can_be_returned_once_or_exchanged_for_what_is_in_stock(desk: OrderDesk) -> None:
    other, item = desk.copy(), delivered_item(desk)
    result = call(desk, "request_return", **item)
    assert desk.rows("SELECT return_id FROM returns")[0]["return_id"] == result["return"]
    assert call(desk, "get_refund_status", order=item["order"])["amount"] == result["refund"]
    assert "already" in call(desk, "request_return", **item)["error"]
    new = next(row for row in options_of(other, item["item"]) if row["in_stock"] and row["item_id"] != item["item"])
    assert call(other, "exchange_item", **item, option=new["option"])["new_item"].endswith(f", {new['option']}")
    left = [row["in_stock"] for row in options_of(other, item["item"]) if row["item_id"] == new["item_id"]]
    assert left == [new["in_stock"] - 1]
    assert "already" in call(other, "request_return", **item)["error"]
