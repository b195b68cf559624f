"""The order desk's requests, its scripted customer, its expert, and an agent's conversations on it."""

from __future__ import annotations

import random
from itertools import islice

import pytest
from helpers.expert_chat import expert_model, saying

from precedent_demo import (
    OrderDesk,
    Request,
    block_folder,
    draft_folder,
    make_database,
    make_requests,
    make_tools,
    run_request,
)
from precedent_demo.conversation import MAX_TURNS
from precedent_demo.logs import expert_messages
from precedent_demo.requests import Customer
from precedent_demo.wording import WORDINGS, Wording
from precedent_demo.workflows import WORKFLOWS, generate_requests
from precedent_drafts.block_draft import holds_block_draft
from precedent_drafts.trained import holds_draft


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


@pytest.mark.parametrize("seed", range(2))
def test_sets_share_no_customer_no_name_and_no_order(seed: int) -> None:
    desk = make_database(seed)
    customers, orders, names = [], [], []
    for set_name in "AB":
        found = make_requests(set_name, full=True, seed=seed)
        customers.append([request.customer_id for request in found])
        orders.append({request.goal.order for request in found})
        rows = [desk.rows("SELECT name FROM customers WHERE customer_id = ?", one)[0] for one in customers[-1]]
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


def test_nothing_that_is_said_spells_out_a_call_or_leaves_a_blank(requests: list[Request]) -> None:
    tools = [tool.name for tool in make_tools(make_database(0))]
    for request in requests:
        for text in (request.opening, *request.replies.values(), *request.remarks):
            assert not any(name in text for name in tools)
            assert "{" not in text


def one_request(requests: list[Request], **wanted: str) -> Request:
    return next(r for r in requests if all(getattr(r.goal, key) == value for key, value in wanted.items()))


def test_the_customer_answers_what_he_is_asked_once_and_then_goes(requests: list[Request]) -> None:
    request = one_request(requests, found_by="asked email")
    customer = Customer(request)
    assert request.goal.email in str(customer.reply("What is your email?"))
    told = [customer.reply("What is your email?") for _ in range(len(request.remarks) + 1)]
    assert told == [*request.remarks, None]
    request = one_request(requests, concern="cancel", found_by="number")
    assert Customer(request).reply("Shall I cancel it?") == request.replies["confirm"]


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
