"""The order desk: its database and tools, requests, scripted customer and expert, outcomes, and an agent on it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableBinding
from langchain_core.utils.function_calling import convert_to_openai_tool

import precedent_demo
from precedent.errors import PromptError
from precedent.text.traces import Trajectory
from precedent_demo import (
    SYSTEM_PROMPT,
    OrderDesk,
    Request,
    block_folder,
    draft_folder,
    make_database,
    make_requests,
    make_tools,
    run_request,
)
from precedent_demo.catalogue import HELD_OUT, TRAIN
from precedent_demo.conversation import MAX_TURNS
from precedent_demo.database import RETURN_WINDOW_DAYS, day
from precedent_demo.judging import DeskOutcome
from precedent_demo.logs import expert_messages, logged
from precedent_demo.wording import WORDINGS, Wording
from precedent_demo.workflows import WORKFLOWS, generate_requests
from precedent_drafts.block_draft import holds_block_draft
from precedent_drafts.trained import holds_draft
from precedent_research.judge import HIDDEN, OF_ROWS, load_judge
from precedent_research.reruns import load_outcome

HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class ScriptedModel(BaseChatModel):
    """Answers by `behaviour(messages)`; calls in Hermes format become tool calls, as in a real chat model."""

    behaviour: Any

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **options: Any) -> RunnableBinding[Any, AIMessage]:
        return RunnableBinding(bound=self, kwargs={"tools": [convert_to_openai_tool(tool) for tool in tools]})

    def _generate(self, messages: list[BaseMessage], *args: Any, **options: Any) -> ChatResult:
        text = self.behaviour(messages)
        calls = [json.loads(body) for body in HERMES_CALL.findall(text)]
        made = [{"name": c["name"], "args": c["arguments"], "id": f"{len(messages)}-{i}"} for i, c in enumerate(calls)]
        message = AIMessage(HERMES_CALL.sub("", text).strip(), tool_calls=made)
        return ChatResult(generations=[ChatGeneration(message=message)])


ROLES = {"human": "user", "ai": "assistant", "tool": "tool"}


def expert_model(request: Request, desk: OrderDesk) -> ScriptedModel:
    """A chat model that says what the expert says behind these very messages, and nothing behind any others."""
    turns = expert_messages(request, desk, random.Random(0))

    def behaviour(messages: list[BaseMessage]) -> str:
        system, *heard = messages
        assert system.text == SYSTEM_PROMPT
        assert [(ROLES[m.type], m.text) for m in heard] == [(m["role"], m["content"]) for m in turns[: len(heard)]]
        turn = turns[len(heard)]
        assert turn["role"] == "assistant"
        calls = [json.dumps(call["function"]) for call in turn.get("tool_calls", [])]
        return str(turn["content"]) + "".join(f"<tool_call>{call}</tool_call>" for call in calls)

    return ScriptedModel(behaviour=behaviour)


def saying(text: str) -> ScriptedModel:
    return ScriptedModel(behaviour=lambda messages: text)


@pytest.fixture(scope="module")
def template() -> OrderDesk:
    return make_database(seed=0)


@pytest.fixture(scope="module")
def requests(template: OrderDesk) -> list[Request]:
    return list(islice(generate_requests("B", 0, template), 2 * len(WORKFLOWS)))


def test_requests_are_deterministic_and_the_usual_set_begins_the_full_one() -> None:
    for set_name, usual, full in (("A", 30, 60), ("B", 15, 40)):
        found = make_requests(set_name, full=True, seed=3)
        assert len(found) == full
        assert make_requests(set_name, full=False, seed=3) == found[:usual]


def test_sets_share_no_customer_no_name_and_no_order(template: OrderDesk) -> None:
    customers, orders, names = [], [], []
    for set_name in "AB":
        found = make_requests(set_name, full=True, seed=0)
        customers.append([request.customer_id for request in found])
        orders.append({request.goal.order for request in found})
        rows = [template.rows("SELECT name FROM customers WHERE customer_id = ?", one)[0] for one in customers[-1]]
        names.append({part for row in rows for part in row["name"].split()})
    assert not set(customers[0]) & set(customers[1])
    assert not orders[0] & orders[1]
    assert not names[0] & names[1]


def sentences(wording: Wording) -> set[str]:
    """Whole sentences: the short words of a greeting or a yes are nobody's own."""
    lists = [wording.concerns, wording.questions, wording.second_concerns, wording.reasons]
    told = {text for group in lists for one in group.values() for text in one}
    return told | {*wording.emails, *wording.numbers, *wording.corrections, *wording.agreements, *wording.refusals}


def test_the_three_sets_share_no_sentence() -> None:
    said = {name: sentences(wording) for name, wording in WORDINGS.items()}
    assert min(map(len, said.values())) >= 50
    for one, other in (("A", "B"), ("A", "train"), ("B", "train")):
        assert not said[one] & said[other]


def one_request(requests: list[Request], **wanted: str) -> Request:
    return next(r for r in requests if all(getattr(r.goal, key) == value for key, value in wanted.items()))


@pytest.mark.parametrize("number", range(0, len(WORKFLOWS), 2))
def test_the_expert_solves_every_request_through_the_agent_and_doing_nothing_solves_none(
    template: OrderDesk, requests: list[Request], number: int
) -> None:
    before, request = template.state(), requests[number]
    transcript = run_request(expert_model(request, template), request, template)
    assert transcript.solved_by_model
    assert any(answer.tool_calls for answer in transcript.answers)
    assert not any(answer.invalid_tool_calls for answer in transcript.answers)
    assert len(transcript.answers) < MAX_TURNS
    idle = run_request(saying("I am happy to help you."), request, template)
    assert not idle.solved_by_model or not (request.calls or request.facts)
    assert idle.gold_reached == (not request.calls)
    assert template.state() == before


def test_the_requests_need_every_tool_and_refused_and_declined_ones_change_nothing(
    template: OrderDesk, requests: list[Request]
) -> None:
    late = [request for request in requests if request.workflow.startswith(("late", "out of", "track", "my "))]
    declined = [request for request in requests if not request.goal.agrees]
    assert late
    assert declined
    assert not any(request.calls for request in [*late, *declined])
    talks = [expert_messages(request, template, random.Random(0)) for request in requests]
    needed = {call["function"]["name"] for talk in talks for one in talk for call in one.get("tool_calls", [])}
    assert needed == {tool.name for tool in make_tools(template)}


def test_both_packaged_drafts_are_there() -> None:
    """Each is loaded only after minutes, on a new machine."""
    assert holds_draft(draft_folder())
    assert holds_block_draft(block_folder())


# The order desk of the demo: its database, tools and policies. The expert's conversations use all of them as well


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


# The order desk's outcome, for `precedent train-judge`, and the judges that it ships

NUMBER = 8
MODELS = Path(precedent_demo.__file__).parent / "models"


@pytest.fixture(scope="module", params=[0, 7])
def served(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The desk's outcome, recorded runs of one database, and its requests."""
    seed = request.param
    records = list(islice(logged("A", seed), NUMBER))
    runs = [
        Trajectory(number, record["task_id"], record["group"], tuple(record["messages"][1:]), ())
        for number, record in enumerate(records)
    ]
    desk = make_database(seed)
    yield DeskOutcome(), runs, list(islice(generate_requests("A", seed, desk), NUMBER)), desk
    desk.close()


def test_a_run_comes_to_its_database_and_the_facts_told(served: Any) -> None:
    """The expert solves every request, each time alike; who says nothing solves none."""
    outcome, runs, requests, desk = served
    changed = 0
    for run, request in zip(runs, requests, strict=True):
        state = outcome(run, expert_model(request, desk))
        assert state is not None
        changed += state != desk.state()
    assert 0 < changed < NUMBER
    assert outcome(runs[0], expert_model(requests[0], desk)) == outcome(runs[0], expert_model(requests[0], desk))
    assert outcome(runs[0], saying("I do not know.")) is None


def test_a_run_of_something_else_is_refused(served: Any) -> None:
    outcome, runs, _, _ = served
    with pytest.raises(PromptError, match="'flight-3' is none of the order desk: its task id is A01, or A01/7"):
        outcome(replace(runs[0], task="flight-3"), saying(""))
    with pytest.raises(PromptError, match="does not begin as the order desk's request of that name"):
        outcome(replace(runs[1], task=runs[0].task), saying(""))


def test_the_desk_is_installed_as_an_outcome_and_its_judges_by_name() -> None:
    """They are for the desk's own target, and their cards say where the threshold lies."""
    assert isinstance(load_outcome("order-desk"), DeskOutcome)
    shipped = (
        ("order-desk", "judge", (*OF_ROWS, HIDDEN)),
        ("order-desk-divergence", "divergence-judge", ("divergence",)),
    )
    for name, folder, features in shipped:
        judge: Any = load_judge(name)
        assert (judge.outcome, judge.features) == ("order-desk", features)
        assert judge.hidden_size in (None, 576)
        assert judge.target.startswith("smollm2-135m-order-desk")
        card = (MODELS / folder / "README.md").read_text(encoding="utf-8")
        assert f"{judge.threshold:.3f}" in card
        assert "does not keep the distribution" in card
