"""The order desk of the demo: its database, tools and policies."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("precedent_demo")

from precedent_demo import OrderDesk, make_database, make_tools
from precedent_demo.catalogue import HELD_OUT, TRAIN
from precedent_demo.database import RETURN_WINDOW_DAYS, day
from precedent_demo.desk import spoken


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


def delivered_item(desk: OrderDesk, comparison: str) -> dict[str, str]:
    query = f"""SELECT order_id, item_id FROM tracking JOIN items USING (order_id)
                WHERE delivered_on {comparison} ? ORDER BY 1, 2"""
    found = desk.rows(query, day(-RETURN_WINDOW_DAYS))[0]
    return {"order": found["order_id"], "item": found["item_id"]}


def other_option(desk: OrderDesk, item: str, in_stock: str = "> 0") -> str:
    query = f"""SELECT option FROM products WHERE product = (SELECT product FROM products WHERE item_id = ?)
                AND item_id != ? AND in_stock {in_stock}"""
    return str(desk.rows(query, item, item)[0]["option"])


def test_seed_fixes_every_row_and_another_seed_gives_other_rows(template: OrderDesk) -> None:
    assert make_database(0).state() == template.state()
    assert make_database(1).state() != template.state()


def test_training_and_held_out_databases_share_no_id_and_no_name() -> None:
    held_out, train = make_database(0), make_database(0, split="train")
    for table, column in (("customers", "customer_id"), ("orders", "order_id"), ("products", "item_id")):
        ids = [{row[column] for row in desk.rows(f"SELECT {column} FROM {table}")} for desk in (held_out, train)]
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


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("find_customer", {"email": "nobody@example.com"}),
        ("list_orders", {"customer": "C0"}),
        ("get_order", {"order": "W0"}),
        ("track_shipment", {"order": "W0"}),
        ("get_refund_status", {"order": "W0"}),
        ("change_address", {"order": "W0", "address": "1 Oak Street, Ashby 10000"}),
        ("cancel_order", {"order": "W0", "reason": "no longer needed"}),
        ("request_return", {"order": "W0", "item": "K0"}),
        ("exchange_item", {"order": "W0", "item": "K0", "option": "red"}),
    ],
)
def test_unknown_ids_are_answered_with_an_error_and_change_nothing(
    desk: OrderDesk, template: OrderDesk, tool: str, arguments: dict[str, str]
) -> None:
    assert list(call(desk, tool, **arguments)) == ["error"]
    assert desk.state() == template.state()


def test_tracking_tells_place_of_a_shipped_and_day_of_a_delivered_order(desk: OrderDesk) -> None:
    assert {"place", "due"} <= set(call(desk, "track_shipment", order=order_with(desk, "shipped")))
    assert "delivered" in call(desk, "track_shipment", order=order_with(desk, "delivered"))
    assert "no shipment" in call(desk, "track_shipment", order=order_with(desk, "pending"))["error"]


def test_a_pending_order_can_be_cancelled_once_and_is_refunded(desk: OrderDesk) -> None:
    order_id = order_with(desk, "pending")
    total = call(desk, "get_order", order=order_id)["total"]
    assert call(desk, "cancel_order", order=order_id, reason="ordered by mistake")["refund"] == total
    assert call(desk, "get_order", order=order_id)["status"] == "cancelled"
    assert call(desk, "get_refund_status", order=order_id)["amount"] == total
    assert "is cancelled" in call(desk, "cancel_order", order=order_id, reason="ordered by mistake")["error"]


@pytest.mark.parametrize("status", ["shipped", "delivered", "cancelled"])
def test_only_pending_orders_can_be_cancelled_or_sent_elsewhere(
    desk: OrderDesk, template: OrderDesk, status: str
) -> None:
    order_id = order_with(desk, status)
    assert status in call(desk, "cancel_order", order=order_id, reason="no longer needed")["error"]
    assert status in call(desk, "change_address", order=order_id, address="7 Elm Avenue, Ashby 20001")["error"]
    assert desk.state() == template.state()


def test_a_delivered_item_can_be_returned_once(desk: OrderDesk) -> None:
    item = delivered_item(desk, ">=")
    result = call(desk, "request_return", **item)
    assert result["send_by"] == spoken(day(14))
    assert desk.rows("SELECT return_id FROM returns")[0]["return_id"] == result["return"]
    assert call(desk, "get_refund_status", order=item["order"])["amount"] == result["refund"]
    assert "already" in call(desk, "request_return", **item)["error"]


def test_an_exchange_takes_the_new_option_from_stock(desk: OrderDesk) -> None:
    item = delivered_item(desk, ">=")
    new = other_option(desk, item["item"])
    stock = """SELECT in_stock FROM products WHERE option = ? AND
               product = (SELECT product FROM products WHERE item_id = ?)"""
    before = desk.rows(stock, new, item["item"])[0]["in_stock"]
    assert call(desk, "exchange_item", **item, option=new)["new_item"].endswith(f", {new}")
    assert desk.rows(stock, new, item["item"])[0]["in_stock"] == before - 1
    assert "already" in call(desk, "request_return", **item)["error"]


def test_an_exchange_is_refused_for_another_product_or_the_same_option(desk: OrderDesk, template: OrderDesk) -> None:
    item = delivered_item(desk, ">=")
    same = desk.rows("SELECT option FROM products WHERE item_id = ?", item["item"])[0]["option"]
    for new in ("striped", same):
        assert "not another option" in call(desk, "exchange_item", **item, option=new)["error"]
    assert desk.state() == template.state()


def test_an_exchange_for_what_is_out_of_stock_is_refused(desk: OrderDesk, template: OrderDesk) -> None:
    query = f"""SELECT order_id, item_id FROM items JOIN products USING (item_id) JOIN tracking USING (order_id)
                WHERE delivered_on >= '{day(-RETURN_WINDOW_DAYS)}' AND product IN
                (SELECT product FROM products other WHERE other.in_stock = 0 AND other.item_id != items.item_id)"""
    found = desk.rows(query)[0]
    item = {"order": found["order_id"], "item": found["item_id"]}
    error = call(desk, "exchange_item", **item, option=other_option(desk, item["item"], "= 0"))["error"]
    assert "out of stock" in error
    assert desk.state() == template.state()


def test_returns_are_refused_after_thirty_days_and_before_delivery(desk: OrderDesk, template: OrderDesk) -> None:
    assert "more than 30 days" in call(desk, "request_return", **delivered_item(desk, "<"))["error"]
    pending = order_with(desk, "pending")
    item_id = desk.rows("SELECT item_id FROM items WHERE order_id = ?", pending)[0]["item_id"]
    assert "is pending" in call(desk, "request_return", order=pending, item=item_id)["error"]
    assert desk.state() == template.state()


def test_wrong_arguments_are_one_short_error_that_names_the_argument(desk: OrderDesk) -> None:
    error = call(desk, "change_address", order="W1")["error"]
    assert "address" in error
    assert len(error) < 120
    assert "reason" in call(desk, "cancel_order", order="W1", reason="because")["error"]
