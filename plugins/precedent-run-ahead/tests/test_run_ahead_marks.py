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

look_up = partial(StructuredTool.from_function, name="look_up", description="A tool.")
refund = partial(StructuredTool.from_function, name="refund", description="A tool.")


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
    return acting()(order)


def refunding(self: Any, order: str) -> str:
    return acting()(order)


def dressed(one: Any) -> Any:
    """LangGraph takes a callable object only if it looks like a function."""
    return functools.update_wrapper(one, acting())


class Endpoint:
    """A client of which each instance does something else."""

    def __init__(self, path: str) -> None:
        self.path = path

    def call(self, order: str) -> str:
        """Call the endpoint."""
        return acting()(self.path)

    def __call__(self, order: str) -> str:
        return self.call(order)

    @classmethod
    def of_class(cls, order: str) -> str:
        """Call by class."""
        return acting()(cls.__name__)


class Refunding(Endpoint):
    """The same methods, on a class of another meaning."""


def with_marked_method() -> type[Endpoint]:
    class Marked(Endpoint):
        @read_only
        def call(self, order: str) -> str:
            """Call the endpoint."""
            return acting()(self.path)

    return Marked


class Own(BaseTool):
    """A tool of one's own class, not marked."""

    name: str
    description: str = "A tool."

    def _run(self, order: str) -> str:
        return acting()(self.name)


def marked_class() -> type[Own]:
    """A class that is marked, made anew for each case."""
    return read_only(type("Marked", (Own,), {}))


def renamed(made: BaseTool, **fields: Any) -> BaseTool:
    return made.model_copy(update={"name": "refund", **fields})


def changed(made: Any, **attributes: Any) -> Any:
    """The object itself with other attributes, whatever its class says of them."""
    for name, value in attributes.items():
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            object.__setattr__(made, name, value) if isinstance(made, BaseTool) else setattr(made, name, value)
    return made


def wrapped(marked: Callable[[str], str]) -> Callable[[str], str]:
    @functools.wraps(marked)
    def wrapper(order: str) -> str:
        return marked(order)

    return wrapper


def wrapped_coroutine(marked: Callable[[str], str]) -> Any:
    @functools.wraps(marked)
    async def wrapper(order: str) -> str:
        return marked(order)

    return wrapper


def of_the_same_code(marked: Any) -> Any:
    clone = types.FunctionType(marked.__code__, marked.__globals__, "clone", None, marked.__closure__)
    return changed(clone, __dict__=dict(marked.__dict__), __annotations__={"order": str}, __doc__="Act.")


def with_all_attributes_of(marked: Any) -> Any:
    kept = {"__closure__", "__globals__", "__class__", "__builtins__", "__new__"}
    return changed(acting(), **{name: getattr(marked, name) for name in dir(marked) if name not in kept})


class Doing(StructuredTool):
    """A tool of a class of its own, which does not call the function that it is made of."""

    def _run(self, *args: Any, config: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        return acting()("refund")


OF_A_TOOL: dict[str, Callable[[Any], BaseTool]] = {
    "another tool on its function": lambda marked: refund(marked.func),
    "the decorator on its function": lambda marked: tool("refund")(marked.func),
    "the decorator on the tool": lambda marked: tool(
        "refund", marked, description="A tool.", args_schema=marked.args_schema
    ),
    "a copy": lambda marked: changed(copy.copy(marked), name="refund"),
    "a deep copy": lambda marked: changed(copy.deepcopy(marked), name="refund"),
    "a model copy": renamed,
    "its fields on another tool": lambda marked: changed(refund(acting()), **{**marked.__dict__, "name": "refund"}),
}
OF_A_FUNCTION: dict[str, Callable[[Any], BaseTool]] = {
    "wraps": lambda marked: refund(wrapped(marked)),
    "wraps in a coroutine": lambda marked: refund(coroutine=wrapped_coroutine(marked)),
    "lru_cache": lambda marked: refund(functools.lru_cache(marked)),
    "a partial": lambda marked: Tool("refund", functools.update_wrapper(functools.partial(marked), marked), "A tool."),
    "another closure of one body": lambda marked: refund(acting()),
    "a function of the same code": lambda marked: refund(of_the_same_code(marked)),
    "all its attributes on another function": lambda marked: refund(with_all_attributes_of(marked)),
    "a model copy with another function": lambda marked: renamed(look_up(marked), func=acting()),
    "a model copy with a coroutine besides": lambda marked: renamed(look_up(marked), coroutine=refund_later),
    "a tool that does not call it": lambda marked: Doing.from_function(marked, name="refund", description="A tool."),
}
OF_A_CLASS: dict[str, Callable[[Any], BaseTool]] = {
    "a subclass": lambda kind: type("Heir", (kind,), {"_run": refunding})(name="refund"),
    "a subclass without changes": lambda kind: type("Heir", (kind,), {})(name="refund"),
    "its base": lambda kind: Own(name="refund"),
}
RELATIVES: dict[str, Callable[[], Pair]] = {
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
    "a marked tool is given another function": lambda: (
        marked_tool(), changed(read_only(refund(acting())), func=acting()),
    ),
    "a marked tool is given a coroutine": lambda: (None, changed(read_only(refund(acting())), coroutine=refund_later)),
    "a marked tool's method is hidden by its instance": lambda: (
        None, changed(marked_class()(name="refund"), _run=refund(acting())._run),
    ),
    "a marked class is given another method": lambda: (
        marked_class()(name="look_up"), changed(marked_class(), _run=refunding)(name="refund"),
    ),
}  # fmt: skip


def marked_tool() -> StructuredTool:
    return read_only(look_up(acting()))


def pair(marked: Any, tool_of: Callable[[Any], BaseTool], make: Callable[[Any], BaseTool]) -> Pair:
    return tool_of(marked), make(marked)


def one_bound_method() -> Pair:
    orders = Endpoint("orders")
    read_only(orders.call)
    return look_up(orders.call), refund(Endpoint("refunds").call)


def a_marked_method_bound_to_an_instance() -> Pair:
    orders = with_marked_method()("orders")
    return read_only(look_up(orders.call)), refund(type(orders)("refunds").call)


def partials_of_one_function() -> Pair:
    act = acting()
    marked = read_only(dressed(functools.partial(act)))
    return Tool("look_up", marked, "A tool."), Tool("refund", dressed(functools.partial(act)), "A tool.")


def the_code_of_a_marked_function_is_replaced() -> Pair:
    @read_only
    def act(order: str) -> str:
        """Act."""
        return order

    act.__code__ = (lambda order: RAN.append("refund") or order).__code__
    return marked_tool(), refund(act)


def a_pickled_tool() -> Pair:
    marked = read_only(Own(name="look_up"))
    return marked, changed(pickle.loads(pickle.dumps(marked)), name="refund")


CASES: dict[str, Callable[[], Pair]] = {
    **{name: lambda make=make: pair(marked_tool(), lambda one: one, make) for name, make in OF_A_TOOL.items()},
    **{name: lambda make=make: pair(read_only(acting()), look_up, make) for name, make in OF_A_FUNCTION.items()},
    **{
        name: lambda make=make: pair(marked_class(), lambda kind: kind(name="look_up"), make)
        for name, make in OF_A_CLASS.items()
    },
    **RELATIVES,
    **{
        one.__name__: one
        for one in (
            one_bound_method, a_marked_method_bound_to_an_instance, partials_of_one_function,
            the_code_of_a_marked_function_is_replaced, a_pickled_tool,
        )
    },
}  # fmt: skip
"""Ways in which Python shares a function."""


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
    marked = read_only(acting())
    static = type("Orders", (), {"static": staticmethod(read_only(acting()))}).static  # type: ignore[attr-defined]
    for made in (look_up(marked), tool("other")(marked), copy.deepcopy(refund(marked)), look_up(static)):
        ahead = RunAheadMiddleware(predict=in_turns([asked_of(made)]))
        ran(ahead, [made], asked_of(made))
        assert ahead.ledger.counts.used == 1


@pytest.mark.parametrize(
    ("marked", "says"),
    [
        *((kind(acting()), "below") for kind in (staticmethod, classmethod)),
        *((kind, "every tool's class") for kind in (BaseTool, StructuredTool, Tool)),
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


def test_a_tool_may_gain_attributes_while_its_mark_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic caches schemas in a tool, on the thread that runs it ahead."""
    marked = read_only(look_up(acting()))

    def grows(one: Any) -> bool:
        vars(marked)[f"cached {len(vars(marked))}"] = 1
        return callable(one)

    monkeypatch.setattr("precedent_run_ahead.marks.callable", grows, raising=False)
    ahead = RunAheadMiddleware(predict=in_turns([call("look_up", order="W7")]))
    agent_on([marked], saying(call("look_up", order="W7")), ahead).invoke(ASKED)
    assert ahead.faults == {}
    assert ahead.ledger.counts.used == 1
