"""A mark covers what was marked and nothing that shares, copies or inherits it: relatives run when the model asks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from helpers.run_ahead_agents import ASKED, agent_on, in_turns, saying
from helpers.scripted_agents import call, calls
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, Tool, tool

from precedent.errors import ConfigError
from precedent_run_ahead import RunAheadMiddleware, read_only

RAN: list[str] = []
"""Whatever a tool of these tests has done, in order."""

Pair = tuple[BaseTool | None, BaseTool]
"""A marked tool, `look_up`, and an unmarked relative of it, `refund`."""


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


def acting() -> Callable[[str], str]:
    """A function that no other case has seen."""

    def act(order: str) -> str:
        """Act."""
        RAN.append(order)
        return order

    return act


async def refund_later(order: str) -> str:
    """Refund."""
    RAN.append("refund")
    return order


look_up = partial(StructuredTool.from_function, name="look_up", description="A tool.")
refund = partial(StructuredTool.from_function, name="refund", description="A tool.")


def marked_tool() -> StructuredTool:
    return read_only(look_up(acting()))


def renamed(other: BaseTool, **fields: Any) -> BaseTool:
    return other.model_copy(update={"name": "refund", **fields})


def dressed(one: Any) -> Any:
    """LangGraph takes a callable object only if it looks like a function."""
    return functools.update_wrapper(one, acting())


class Endpoint:
    """A client of which each instance does something else."""

    def __init__(self, path: str) -> None:
        self.path = path

    def call(self, order: str) -> str:
        """Call the endpoint."""
        RAN.append(self.path)
        return self.path

    def __call__(self, order: str) -> str:
        return self.call(order)

    @classmethod
    def of_class(cls, order: str) -> str:
        """Call by class."""
        RAN.append(cls.__name__)
        return cls.__name__


class Refunding(Endpoint):
    """The same methods, on a class of another meaning."""


def with_marked_method() -> type[Endpoint]:
    class Marked(Endpoint):
        @read_only
        def call(self, order: str) -> str:
            """Call the endpoint."""
            RAN.append(self.path)
            return self.path

    return Marked


class Own(BaseTool):
    """A tool of one's own class, not marked."""

    name: str
    description: str = "A tool."

    def _run(self, order: str) -> str:
        RAN.append(self.name)
        return self.name


def marked_class() -> type[Own]:
    """A class that is marked, made anew for each case."""
    return read_only(type("Marked", (Own,), {}))


def called_refund(made: BaseTool) -> BaseTool:
    made.name = "refund"
    return made


def wrapped(marked: Callable[[str], str]) -> Callable[[str], str]:
    @functools.wraps(marked)
    def wrapper(order: str) -> str:
        return marked(order)

    return wrapper


def wrapped_coroutine(marked: Callable[[str], str]) -> BaseTool:
    @functools.wraps(marked)
    async def wrapper(order: str) -> str:
        return marked(order)

    return refund(coroutine=wrapper)


def of_the_same_code(marked: Any) -> Any:
    clone = types.FunctionType(marked.__code__, marked.__globals__, "clone", None, marked.__closure__)
    clone.__dict__.update(marked.__dict__)
    clone.__annotations__, clone.__doc__ = {"order": str}, "Act."
    return clone


def with_all_attributes_of(marked: Any) -> Any:
    other = acting()
    for name in dir(marked):
        if name not in {"__closure__", "__globals__", "__class__", "__builtins__", "__new__"}:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(other, name, getattr(marked, name))
    return other


def with_fields_of(marked: BaseTool) -> BaseTool:
    relative = refund(acting())
    relative.__dict__.update({**marked.__dict__, "name": "refund"})
    return relative


def doing(marked: Callable[[str], str]) -> BaseTool:
    """A tool of a class of its own, which does not call the function that it is made of."""

    class Doing(StructuredTool):
        def _run(self, *args: Any, config: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            RAN.append("refund")
            return "refund"

    return Doing.from_function(marked, name="refund", description="A tool.")


OF_A_TOOL: dict[str, Callable[[Any], BaseTool]] = {
    "another tool on its function": lambda marked: refund(marked.func),
    "the decorator on its function": lambda marked: tool("refund")(marked.func),
    "the decorator on the tool": lambda marked: tool(
        "refund", marked, description="A tool.", args_schema=marked.args_schema
    ),
    "a copy": lambda marked: called_refund(copy.copy(marked)),
    "a deep copy": lambda marked: called_refund(copy.deepcopy(marked)),
    "a model copy": renamed,
    "its fields on another tool": with_fields_of,
}
OF_A_FUNCTION: dict[str, Callable[[Any], BaseTool]] = {
    "wraps": lambda marked: refund(wrapped(marked)),
    "wraps in a coroutine": wrapped_coroutine,
    "lru_cache": lambda marked: refund(functools.lru_cache(marked)),
    "a partial": lambda marked: Tool("refund", functools.update_wrapper(functools.partial(marked), marked), "A tool."),
    "another closure of one body": lambda marked: refund(acting()),
    "a function of the same code": lambda marked: refund(of_the_same_code(marked)),
    "all its attributes on another function": lambda marked: refund(with_all_attributes_of(marked)),
    "a model copy with another function": lambda marked: renamed(look_up(marked), func=acting()),
    "a model copy with a coroutine besides": lambda marked: renamed(look_up(marked), coroutine=refund_later),
    "a tool that does not call it": doing,
}
OF_A_CLASS: dict[str, Callable[[Any], BaseTool]] = {
    "a subclass": lambda kind: type("Heir", (kind,), {"_run": _refunding})(name="refund"),
    "a subclass without changes": lambda kind: type("Heir", (kind,), {})(name="refund"),
    "its base": lambda kind: Own(name="refund"),
}


def _refunding(self: Any, order: str) -> str:
    RAN.append("refund")
    return "refund"


def _refunding(self: Any, order: str) -> str:
    RAN.append("refund")
    return "refund"


def pair(marked: Any, tool_of: Callable[[Any], BaseTool], make: Callable[[Any], BaseTool]) -> Pair:
    return tool_of(marked), make(marked)


CASES: dict[str, Callable[[], Pair]] = {
    **{f"tool: {name}": lambda make=make: pair(marked_tool(), lambda one: one, make)
       for name, make in OF_A_TOOL.items()},
    **{f"function: {name}": lambda make=make: pair(read_only(acting()), look_up, make)
       for name, make in OF_A_FUNCTION.items()},
    **{f"class: {name}": lambda make=make: pair(marked_class(), lambda kind: kind(name="look_up"), make)
       for name, make in OF_A_CLASS.items()},
    "bound methods of one class": lambda: (
        read_only(look_up(Endpoint("orders").call)), refund(Endpoint("refunds").call),
    ),
    "a marked method is inherited": lambda: (None, refund(type("Heir", (with_marked_method(),), {})("refunds").call)),
    "a marked method is taken over by another class": lambda: (
        None, refund(type("Other", (), {"path": "refunds", "call": with_marked_method().__dict__["call"]})().call),
    ),
    "another instance of one class": lambda: (read_only(Own(name="look_up")), Own(name="refund")),
    "class methods": lambda: (look_up(read_only(Endpoint.of_class)), refund(Refunding.of_class)),
    "callable instances": lambda: (
        Tool("look_up", read_only(dressed(Endpoint("orders"))), "A tool."),
        Tool("refund", dressed(Endpoint("refunds")), "A tool."),
    ),
    "a marked class that calls any function": lambda: (
        None, read_only(type("Calling", (StructuredTool,), {})).from_function(acting(), name="refund", description="x"),
    ),
}  # fmt: skip
"""Ways in which Python shares a function."""


def case(build: Callable[[], Pair]) -> Callable[[], Pair]:
    """Add another way."""
    CASES[build.__name__] = build
    return build


@case
def one_bound_method_is_marked() -> Pair:
    orders = Endpoint("orders")
    read_only(orders.call)
    return look_up(orders.call), refund(Endpoint("refunds").call)


@case
def a_marked_method_is_bound_to_an_instance() -> Pair:
    orders = with_marked_method()("orders")
    return read_only(look_up(orders.call)), refund(type(orders)("refunds").call)


@case
def partials_of_one_function() -> Pair:
    act = acting()
    marked = read_only(dressed(functools.partial(act)))
    return Tool("look_up", marked, "A tool."), Tool("refund", dressed(functools.partial(act)), "A tool.")


@case
def the_code_of_a_marked_function_is_replaced() -> Pair:
    @read_only
    def changed(order: str) -> str:
        """Act."""
        return order

    changed.__code__ = (lambda order: RAN.append("refund") or order).__code__
    return look_up(read_only(acting())), refund(changed)


@case
def a_pickled_tool() -> Pair:
    marked = read_only(Own(name="look_up"))
    return marked, called_refund(pickle.loads(pickle.dumps(marked)))


@case
def a_marked_tool_is_given_another_function() -> Pair:
    changed = read_only(refund(acting()))
    changed.func = acting()
    return marked_tool(), changed


@case
def a_marked_tool_is_given_a_coroutine() -> Pair:
    changed = read_only(refund(acting()))
    changed.coroutine = refund_later
    return None, changed


@case
def a_marked_tool_s_method_is_hidden_by_its_instance() -> Pair:
    kind = marked_class()
    changed = kind(name="refund")
    changed.__dict__["_run"] = refund(acting())._run
    return kind(name="look_up"), changed


@case
def a_marked_class_is_given_another_method() -> Pair:
    kind, changed = marked_class(), marked_class()
    changed._run = _refunding  # type: ignore[method-assign]
    return kind(name="look_up"), changed(name="refund")


def asked_of(made: BaseTool) -> dict[str, Any]:
    """A call of the tool; `Tool` calls its argument `__arg1`."""
    return call(made.name, **{"__arg1" if type(made) is Tool else "order": "W7"})


def ran(ahead: RunAheadMiddleware, tools: list[BaseTool], *asked: dict[str, Any], said: Any = ASKED) -> Any:
    """The messages of an agent whose model makes these calls, one after the other."""
    return asyncio.run(agent_on(tools, saying(*asked), ahead).ainvoke(said))["messages"]


@pytest.mark.parametrize("name", CASES)
def test_an_unmarked_relative_runs_only_when_the_model_asks_and_the_marked_one_ahead(name: str) -> None:
    marked, relative = CASES[name]()
    tools = [one for one in (marked, relative) if one is not None]
    for allow in ([], [] if marked is None else [marked]):
        ahead = RunAheadMiddleware(allow, predict=in_turns([asked_of(relative)]))
        ran(ahead, tools)
        assert (ahead.ledger.counts.started, RAN) == (0, [])
    ahead = RunAheadMiddleware(predict=in_turns([asked_of(relative)]), listen=True)
    assert ran(ahead, tools, asked_of(relative))[-2].status == "success"
    assert ahead.ledger.counts.started == 0
    if marked is not None:
        RAN.clear()
        ahead = RunAheadMiddleware(predict=in_turns([asked_of(marked)]))
        ran(ahead, tools, asked_of(marked))
        assert (ahead.ledger.counts.used, len(RAN)) == (1, 1)


def test_every_tool_of_a_marked_function_runs_ahead() -> None:
    """The function itself was declared to read, so it does not matter how many tools are made of it."""

    class Orders:
        static = staticmethod(read_only(acting()))

    marked = read_only(acting())
    for made in (look_up(marked), tool("other")(marked), copy.deepcopy(refund(marked)), look_up(Orders.static)):
        ahead = RunAheadMiddleware(predict=in_turns([asked_of(made)]))
        ran(ahead, [made], asked_of(made))
        assert ahead.ledger.counts.used == 1


@pytest.mark.parametrize(
    ("marked", "says"),
    [
        (staticmethod(acting()), "below"),
        (classmethod(acting()), "below"),
        (BaseTool, "BaseTool"),
        (StructuredTool, "StructuredTool"),
        (Tool, "every tool's class"),
        (7, "7"),
    ],
    ids=["static method", "class method", "BaseTool", "StructuredTool", "Tool", "number"],
)
def test_what_cannot_be_marked_is_refused(marked: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_only(marked)


@pytest.mark.parametrize("given", ["allow", "arguments_from_tools"])
def test_a_function_on_the_list_is_that_function_and_not_its_name(given: str) -> None:
    """`functools.wraps` copies the name as well."""
    function, said = acting(), ASKED
    settings: dict[str, Any] = {"allow": [function]}
    if given == "arguments_from_tools":
        earlier = call("find", order="W7")
        result = ToolMessage("its customer is C7", tool_call_id=earlier["id"], name="find")
        settings = {"allow": ["act"], "arguments_from_tools": [function]}
        said = {"messages": [*ASKED["messages"], calls(earlier), result]}
    started = []
    for one in (tool(function), tool(wrapped(function))):
        ahead = RunAheadMiddleware(predict=lambda state, one=one: [call(one.name, order="C7")], **settings)
        ran(ahead, [one], said=said)
        started.append(ahead.ledger.counts.started)
    assert started == [1, 0]


def test_a_method_marked_in_its_class_says_what_to_mark_instead() -> None:
    made = look_up(with_marked_method()("orders").call)
    ahead = RunAheadMiddleware(predict=in_turns([asked_of(made)]))
    ran(ahead, [made])
    assert "read_only(tool)" in ahead.refused["look_up"]
