"""The order desk of the demo: its database, tools and policies, requests and scripted conversations."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableBinding
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

pytest.importorskip("precedent_demo")

from precedent.errors import ConfigError
from precedent_demo import (
    SYSTEM_PROMPT,
    OrderDesk,
    Request,
    make_database,
    make_requests,
    make_tools,
    run_request,
)
from precedent_demo.database import day
from precedent_demo.desk import RETURN_WINDOW_DAYS
from precedent_demo.wording import WORDINGS

HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@pytest.fixture(scope="module")
def template() -> OrderDesk:
    return make_database(seed=0)


@pytest.fixture
def desk(template: OrderDesk) -> OrderDesk:
    return template.copy()


class ScriptedModel(BaseChatModel):
    """Answers by `behaviour(messages)`; calls in Hermes format become tool calls, as in a real chat model."""

    behaviour: Any
    seen: list[list[str]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> RunnableBinding[Any, AIMessage]:
        return RunnableBinding(bound=self, kwargs={"tools": [convert_to_openai_tool(tool) for tool in tools]})

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> ChatResult:
        self.seen.append([message.text for message in messages])
        text = self.behaviour(messages)
        calls = [json.loads(body) for body in HERMES_CALL.findall(text)]
        made = [{"name": c["name"], "args": c["arguments"], "id": f"{len(messages)}-{i}"} for i, c in enumerate(calls)]
        usage = {"input_tokens": 1, "output_tokens": len(text), "total_tokens": 1 + len(text)}
        message = AIMessage(HERMES_CALL.sub("", text).strip(), tool_calls=made, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


def obedient(messages: list[BaseMessage]) -> str:
    """Says what it was told to say, and otherwise something."""
    told = HERMES_CALL.search(messages[-1].text) if isinstance(messages[-1], HumanMessage) else None
    return told.group(0) if told else "It is as the result says."


def call(desk: OrderDesk, tool: str, **arguments: str) -> dict[str, Any]:
    answer = {one.name: one for one in make_tools(desk)}[tool].invoke(arguments)
    result: dict[str, Any] = json.loads(answer)
    return result


def order_with(desk: OrderDesk, status: str) -> str:
    return str(desk.rows("SELECT order_id FROM orders WHERE status = ? ORDER BY order_id", status)[0]["order_id"])


def delivered_item(desk: OrderDesk, comparison: str) -> dict[str, str]:
    query = f"""SELECT order_id, item_id FROM tracking JOIN items USING (order_id)
                WHERE delivered_on {comparison} ? ORDER BY 1, 2"""
    return dict(desk.rows(query, day(-RETURN_WINDOW_DAYS))[0])


def other_option(desk: OrderDesk, item_id: str) -> str:
    query = """SELECT item_id FROM products WHERE product = (SELECT product FROM products WHERE item_id = ?)
               AND item_id != ? AND in_stock > 0"""
    return str(desk.rows(query, item_id, item_id)[0]["item_id"])


# --- database -------------------------------------------------------------------------------------------------------


def test_seed_fixes_every_row_and_another_seed_gives_other_rows(template: OrderDesk) -> None:
    assert make_database(0).state() == template.state()
    assert make_database(1).state() != template.state()


def test_database_holds_a_few_hundred_orders_in_every_status(template: OrderDesk) -> None:
    counts = {row["status"]: row["n"] for row in template.rows("SELECT status, count(*) n FROM orders GROUP BY 1")}
    assert set(counts) == {"pending", "shipped", "delivered", "cancelled"}
    assert 300 <= sum(counts.values()) <= 700
    assert min(counts.values()) >= 20


def test_payments_equal_the_items_and_every_shipped_order_is_tracked(template: OrderDesk) -> None:
    wrong = """SELECT 1 FROM payments
               WHERE amount != (SELECT sum(price) FROM items WHERE items.order_id = payments.order_id)"""
    untracked = """SELECT 1 FROM orders LEFT JOIN tracking USING (order_id)
                   WHERE (status IN ('shipped', 'delivered')) != (carrier IS NOT NULL)"""
    assert not template.rows(wrong)
    assert not template.rows(untracked)


def test_copy_is_equal_and_independent(template: OrderDesk, desk: OrderDesk) -> None:
    before = template.state()
    assert desk.state() == before
    call(desk, "cancel_order", order_id=order_with(desk, "pending"), reason="no longer needed")
    assert desk.state() != before
    assert template.state() == before


# --- tools and policies ---------------------------------------------------------------------------------------------


def test_find_customer_ignores_case_and_leads_to_the_orders(desk: OrderDesk) -> None:
    known = desk.rows("SELECT * FROM customers ORDER BY customer_id")[0]
    found = call(desk, "find_customer", email=known["email"].upper())
    assert (found["customer_id"], found["name"]) == (known["customer_id"], known["name"])
    orders = call(desk, "list_orders", customer_id=found["customer_id"])["orders"]
    stored = desk.rows("SELECT order_id FROM orders WHERE customer_id = ?", known["customer_id"])
    assert {order["order_id"] for order in orders} == {row["order_id"] for row in stored}


def test_get_order_shows_items_that_sum_to_the_total(desk: OrderDesk) -> None:
    order_id = order_with(desk, "delivered")
    shown = call(desk, "get_order", order_id=order_id)
    assert (shown["order_id"], shown["status"]) == (order_id, "delivered")
    assert sum(item["price"] for item in shown["items"]) == pytest.approx(shown["total"])


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("find_customer", {"email": "nobody@example.com"}),
        ("list_orders", {"customer_id": "C0"}),
        ("get_order", {"order_id": "W0"}),
        ("track_shipment", {"order_id": "W0"}),
        ("get_refund_status", {"order_id": "W0"}),
        ("change_address", {"order_id": "W0", "street": "1 Oak Street", "city": "Ashby", "zip": "10000"}),
        ("cancel_order", {"order_id": "W0", "reason": "no longer needed"}),
        ("request_return", {"order_id": "W0", "item_id": "K0"}),
        ("exchange_item", {"order_id": "W0", "item_id": "K0", "new_item_id": "K1"}),
    ],
)
def test_unknown_ids_are_answered_with_an_error_and_change_nothing(
    desk: OrderDesk, template: OrderDesk, tool: str, arguments: dict[str, str]
) -> None:
    assert list(call(desk, tool, **arguments)) == ["error"]
    assert desk.state() == template.state()


def test_tracking_tells_place_of_a_shipped_and_day_of_a_delivered_order(desk: OrderDesk) -> None:
    assert {"location", "due_on"} <= set(call(desk, "track_shipment", order_id=order_with(desk, "shipped")))
    assert "delivered_on" in call(desk, "track_shipment", order_id=order_with(desk, "delivered"))
    assert "no shipment" in call(desk, "track_shipment", order_id=order_with(desk, "pending"))["error"]


def test_a_pending_order_can_be_cancelled_once_and_is_refunded(desk: OrderDesk) -> None:
    order_id = order_with(desk, "pending")
    total = call(desk, "get_order", order_id=order_id)["total"]
    assert call(desk, "cancel_order", order_id=order_id, reason="ordered by mistake")["refund"] == total
    assert call(desk, "get_order", order_id=order_id)["status"] == "cancelled"
    assert call(desk, "get_refund_status", order_id=order_id)["amount"] == total
    assert "is cancelled" in call(desk, "cancel_order", order_id=order_id, reason="ordered by mistake")["error"]


def test_address_of_a_pending_order_changes(desk: OrderDesk) -> None:
    order_id = order_with(desk, "pending")
    call(desk, "change_address", order_id=order_id, street="7 Elm Avenue", city="Ashby", zip="20001")
    assert call(desk, "get_order", order_id=order_id)["address"] == "7 Elm Avenue, Ashby 20001"


@pytest.mark.parametrize("status", ["shipped", "delivered", "cancelled"])
def test_only_pending_orders_can_be_cancelled_or_sent_elsewhere(
    desk: OrderDesk, template: OrderDesk, status: str
) -> None:
    order_id = order_with(desk, status)
    place = {"street": "7 Elm Avenue", "city": "Ashby", "zip": "20001"}
    assert status in call(desk, "cancel_order", order_id=order_id, reason="no longer needed")["error"]
    assert status in call(desk, "change_address", order_id=order_id, **place)["error"]
    assert desk.state() == template.state()


def test_a_delivered_item_can_be_returned_once(desk: OrderDesk) -> None:
    item = delivered_item(desk, ">=")
    result = call(desk, "request_return", **item)
    assert result["send_by"] == day(14)
    assert desk.rows("SELECT return_id FROM returns")[0]["return_id"] == result["return_id"]
    assert call(desk, "get_refund_status", order_id=item["order_id"])["amount"] == result["refund"]
    assert "already" in call(desk, "request_return", **item)["error"]


def test_an_exchange_takes_the_new_option_from_stock(desk: OrderDesk) -> None:
    item = delivered_item(desk, ">=")
    new = other_option(desk, item["item_id"])
    stock = "SELECT in_stock FROM products WHERE item_id = ?"
    before = desk.rows(stock, new)[0]["in_stock"]
    assert "exchange_id" in call(desk, "exchange_item", **item, new_item_id=new)
    assert desk.rows(stock, new)[0]["in_stock"] == before - 1
    assert "already" in call(desk, "request_return", **item)["error"]


def test_an_exchange_is_refused_for_another_product_or_the_same_option(desk: OrderDesk, template: OrderDesk) -> None:
    item = delivered_item(desk, ">=")
    query = """SELECT item_id FROM products WHERE product != (SELECT product FROM products WHERE item_id = ?)"""
    stranger = desk.rows(query, item["item_id"])[0]["item_id"]
    for new in (stranger, item["item_id"]):
        assert "not another option" in call(desk, "exchange_item", **item, new_item_id=new)["error"]
    assert desk.state() == template.state()


def test_returns_are_refused_after_thirty_days_and_before_delivery(desk: OrderDesk, template: OrderDesk) -> None:
    assert "more than 30 days" in call(desk, "request_return", **delivered_item(desk, "<"))["error"]
    pending = order_with(desk, "pending")
    item_id = desk.rows("SELECT item_id FROM items WHERE order_id = ?", pending)[0]["item_id"]
    assert "is pending" in call(desk, "request_return", order_id=pending, item_id=item_id)["error"]
    assert desk.state() == template.state()


def test_wrong_arguments_are_one_short_error_that_names_the_argument(desk: OrderDesk) -> None:
    error = call(desk, "change_address", order_id="W1")["error"]
    assert "street" in error
    assert len(error) < 120
    assert "reason" in call(desk, "cancel_order", order_id="W1", reason="because")["error"]


def test_prompt_head_is_short_and_every_tool_is_described(desk: OrderDesk) -> None:
    """Real count with SmolLM2's tokenizer: about 3.4 characters per token of schema text."""
    schemas = [convert_to_openai_tool(tool) for tool in make_tools(desk)]
    assert len(schemas) >= 8
    assert all(schema["function"]["description"] for schema in schemas)
    head = SYSTEM_PROMPT + "\n".join(json.dumps(schema) for schema in schemas)
    assert len(head) < 2_700


# --- requests -------------------------------------------------------------------------------------------------------


def test_requests_are_deterministic_and_the_usual_set_begins_the_full_one() -> None:
    for set_name, usual, full in (("A", 30, 60), ("B", 15, 40)):
        requests = make_requests(set_name, full=True, seed=3)
        assert len(requests) == full
        assert make_requests(set_name, full=False, seed=3) == requests[:usual]


def test_every_workflow_occurs_in_both_usual_sets() -> None:
    kinds = [{request.workflow for request in make_requests(name, full=False, seed=0)} for name in "AB"]
    assert kinds == [set(WORDINGS), set(WORDINGS)]


@pytest.mark.parametrize("seed", range(5))
def test_sets_share_no_customer_no_name_and_no_order(seed: int) -> None:
    desk = make_database(seed)
    customers, orders, names = [], [], []
    for set_name in "AB":
        requests = make_requests(set_name, full=True, seed=seed)
        customers.append([request.customer_id for request in requests])
        orders.append({c.arguments["order_id"] for r in requests for c in r.calls if "order_id" in c.arguments})
        rows = [desk.rows("SELECT name FROM customers WHERE customer_id = ?", one)[0] for one in customers[-1]]
        names.append({part for row in rows for part in row["name"].split()})
    assert len(set(customers[0] + customers[1])) == len(customers[0]) + len(customers[1])
    assert not orders[0] & orders[1]
    assert not names[0] & names[1]


def test_sets_share_no_sentence() -> None:
    said: dict[str, set[str]] = {"A": set(), "B": set()}
    for wordings in WORDINGS.values():
        for set_name, wording in wordings.items():
            said[set_name] |= {*wording.openings, *wording.questions, *wording.last_questions}
    assert not said["A"] & said["B"]
    assert min(len(said["A"]), len(said["B"])) >= 50


@pytest.mark.parametrize("set_name", ["A", "B"])
def test_scripts_lead_to_one_call_and_then_ask_twice(set_name: str) -> None:
    for request in make_requests(set_name, full=True, seed=0):
        assert [line.call is not None for line in request.script] == [True, False, False]
        assert not any("{" in line.text for line in request.script)  # every blank is filled
        customer, lead = request.script[0].messages
        assert customer == request.first_message
        assert json.loads(HERMES_CALL.findall(lead)[0])["name"] == request.calls[0].name


def test_every_tool_is_needed_by_some_request(desk: OrderDesk) -> None:
    needed = {one.name for request in make_requests("B", full=False, seed=0) for one in request.calls}
    assert needed == {tool.name for tool in make_tools(desk)}


def test_unknown_set_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'C'.*A and B"):
        make_requests("C", full=False, seed=0)


# --- conversations --------------------------------------------------------------------------------------------------


def one_request(workflow: str) -> Request:
    return next(request for request in make_requests("B", full=False, seed=0) if request.workflow == workflow)


@pytest.mark.parametrize("workflow", list(WORDINGS))
def test_a_model_that_makes_the_calls_reaches_the_gold_state(template: OrderDesk, workflow: str) -> None:
    before, request = template.state(), one_request(workflow)
    transcript = run_request(ScriptedModel(behaviour=obedient), request, template)
    assert transcript.solved_by_model
    assert transcript.calls_made == transcript.calls_expected == len(request.calls)
    assert len(transcript.answers) == len(request.script)
    assert all(answer.usage_metadata for answer in transcript.answers)
    assert template.state() == before


def test_refused_cancellation_leaves_the_order_and_tells_the_model_why(template: OrderDesk) -> None:
    transcript = run_request(ScriptedModel(behaviour=obedient), one_request("late cancel"), template)
    results = [json.loads(message.text) for message in transcript.messages if message.type == "tool"]
    assert "is shipped" in results[-1]["error"]
    assert transcript.gold_reached


MISBEHAVIOURS = {
    "prose": lambda messages: "I am happy to help you.",
    "empty": lambda messages: "",
    "unknown tool": lambda messages: '<tool_call>{"name": "teleport", "arguments": {}}</tool_call>',
    "wrong tool": lambda messages: '<tool_call>{"name": "list_orders", "arguments": {"customer_id": "C1"}}</tool_call>',
    "wrong arguments": lambda messages: '<tool_call>{"name": "get_order", "arguments": {"id": 7}}</tool_call>',
}


@pytest.mark.parametrize("workflow", ["cancel", "list orders"])
@pytest.mark.parametrize("kind", list(MISBEHAVIOURS))
def test_a_model_that_never_makes_the_call_is_shown_the_result_and_the_turns_stay_the_same(
    template: OrderDesk, kind: str, workflow: str
) -> None:
    request = one_request(workflow)
    transcript = run_request(ScriptedModel(behaviour=MISBEHAVIOURS[kind]), request, template)
    assert len(transcript.answers) == len(request.script)
    assert transcript.calls_made == 0
    assert transcript.gold_reached
    assert not transcript.solved_by_model
    shown = [message.text for message in transcript.messages if message.text.startswith("The system shows: {")]
    assert len(shown) == len(request.calls)


def test_a_harmful_extra_call_has_a_real_effect_and_misses_the_gold_state(template: OrderDesk) -> None:
    victim = template.rows("SELECT order_id FROM orders WHERE status = 'pending' ORDER BY order_id")[-1]["order_id"]
    harm = {"name": "cancel_order", "arguments": {"order_id": victim, "reason": "no longer needed"}}
    text = f"<tool_call>{json.dumps(harm)}</tool_call>"
    transcript = run_request(ScriptedModel(behaviour=lambda messages: text), one_request("track"), template)
    assert len(transcript.answers) == len(one_request("track").script)
    assert not transcript.gold_reached


def test_same_outputs_give_the_same_prompts(template: OrderDesk) -> None:
    """Prompts may not depend on what earlier runs did: two runs of one request see equal messages in every turn."""
    request = one_request("return")
    first, second = ScriptedModel(behaviour=obedient, seen=[]), ScriptedModel(behaviour=obedient, seen=[])
    run_request(first, request, template)
    run_request(second, request, template)
    assert first.seen == second.seen
    assert len(first.seen) == len(request.script)
    assert first.seen[0][0] == SYSTEM_PROMPT
