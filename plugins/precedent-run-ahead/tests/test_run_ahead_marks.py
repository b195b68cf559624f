"""A mark covers what was marked and nothing that shares, copies or inherits it: relatives run when the model asks."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
from helpers.run_ahead_agents import ASKED, in_turns
from helpers.scripted_agents import ScriptedChat, call, calls, script
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, Tool, tool

from precedent.errors import ConfigError
from precedent_run_ahead import RunAheadMiddleware, read_only

RAN: list[str] = []
"""Whatever a tool of these tests has done, in order."""

Pair = tuple[BaseTool | None, BaseTool]
"""A marked tool, `look_up`, and an unmarked relative of it, `refund`."""

CASES: list[Callable[[], Pair]] = []


def case(build: Callable[[], Pair]) -> Callable[[], Pair]:
    """Add a way in which Python shares a function."""
    CASES.append(build)
    return build


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    RAN.clear()


def named(function: Callable[..., Any], name: str, **options: Any) -> StructuredTool:
    return StructuredTool.from_function(function, name=name, description="A tool.", **options)


def fresh() -> Callable[[str], str]:
    """A function that no other case has seen."""

    def act(order: str) -> str:
        """Act."""
        RAN.append(order)
        return order

    return act


def dressed(one: Any) -> Any:
    """LangGraph takes a callable object only if it looks like a function."""
    return functools.update_wrapper(one, fresh())


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


class Own(BaseTool):
    """A tool of one's own class, not marked."""

    name: str
    description: str = "A tool."

    def _run(self, order: str) -> str:
        RAN.append(self.name)
        return self.name


def marked_class() -> type[Own]:
    """A class that is marked, made anew for each case."""

    @read_only
    class Marked(Own):
        pass

    return Marked


def renamed(other: BaseTool, **fields: Any) -> BaseTool:
    return other.model_copy(update={"name": "refund", **fields})


@case
def bound_methods_of_one_class() -> Pair:
    return read_only(named(Endpoint("orders").call, "look_up")), named(Endpoint("refunds").call, "refund")


@case
def one_bound_method_is_marked() -> Pair:
    orders = Endpoint("orders")
    read_only(orders.call)
    return named(orders.call, "look_up"), named(Endpoint("refunds").call, "refund")


def with_marked_method() -> type[Endpoint]:
    class Marked(Endpoint):
        @read_only
        def call(self, order: str) -> str:
            """Call the endpoint."""
            RAN.append(self.path)
            return self.path

    return Marked


@case
def a_marked_method_is_inherited() -> Pair:
    class Heir(with_marked_method()):  # type: ignore[misc]
        """Its `path` may be anything."""

    return None, named(Heir("refunds").call, "refund")


@case
def a_marked_method_is_bound_to_an_instance() -> Pair:
    orders = with_marked_method()("orders")
    return read_only(named(orders.call, "look_up")), named(type(orders)("refunds").call, "refund")


@case
def a_marked_method_is_taken_over_by_another_class() -> Pair:
    class Other:
        path = "refunds"
        call = with_marked_method().__dict__["call"]

    return None, named(Other().call, "refund")


@case
def class_methods() -> Pair:
    read_only(Endpoint.of_class)
    return named(Endpoint.of_class, "look_up"), named(Refunding.of_class, "refund")


@case
def callable_instances() -> Pair:
    orders = read_only(dressed(Endpoint("orders")))
    return Tool("look_up", orders, "A tool."), Tool("refund", dressed(Endpoint("refunds")), "A tool.")


@case
def two_tools_on_one_function() -> Pair:
    function = fresh()
    return read_only(named(function, "look_up")), named(function, "refund")


@case
def another_tool_from_the_function_of_a_marked_tool() -> Pair:
    marked = read_only(named(fresh(), "look_up"))
    return marked, named(marked.func, "refund")


@case
def the_tool_decorator_again() -> Pair:
    function = fresh()
    return read_only(tool("look_up")(function)), tool("refund")(function)


@case
def the_tool_decorator_on_a_tool() -> Pair:
    marked = read_only(named(fresh(), "look_up"))
    return marked, tool("refund", marked, description="A tool.", args_schema=marked.args_schema)


@case
def a_decorator_that_returns_the_same_function() -> Pair:
    def register(one: Callable[..., Any]) -> Callable[..., Any]:
        return one

    function = fresh()
    return read_only(named(function, "look_up")), named(register(function), "refund")


@case
def functools_wraps() -> Pair:
    marked = read_only(fresh())

    @functools.wraps(marked)
    def wrapper(order: str) -> str:
        return marked(order)

    return named(marked, "look_up"), named(wrapper, "refund")


@case
def functools_wraps_in_a_coroutine() -> Pair:
    marked = read_only(fresh())

    @functools.wraps(marked)
    async def wrapper(order: str) -> str:
        return marked(order)

    return named(marked, "look_up"), StructuredTool.from_function(
        coroutine=wrapper, name="refund", description="A tool."
    )


@case
def lru_cache() -> Pair:
    marked = read_only(fresh())
    return named(marked, "look_up"), named(functools.lru_cache(marked), "refund")


@case
def partials() -> Pair:
    def act(order: str, how: str = "look up") -> str:
        """Act."""
        RAN.append(how)
        return how

    marked = read_only(act)
    relative = functools.update_wrapper(functools.partial(marked, how="refund"), marked)
    return named(marked, "look_up"), Tool("refund", relative, "A tool.")


@case
def partials_of_one_function() -> Pair:
    act = fresh()
    marked = read_only(dressed(functools.partial(act)))
    return Tool("look_up", marked, "A tool."), Tool("refund", dressed(functools.partial(act)), "A tool.")


@case
def closures_of_one_body() -> Pair:
    return named(read_only(fresh()), "look_up"), named(fresh(), "refund")


@case
def a_function_made_of_the_same_code() -> Pair:
    marked = read_only(fresh())
    clone = types.FunctionType(marked.__code__, marked.__globals__, "clone", None, marked.__closure__)
    clone.__dict__.update(marked.__dict__)
    clone.__annotations__, clone.__doc__ = {"order": str}, "Act."
    return named(marked, "look_up"), named(clone, "refund")


@case
def all_attributes_copied_to_another_function() -> Pair:
    marked, other = read_only(fresh()), fresh()
    for name in dir(marked):
        if name not in {"__closure__", "__globals__", "__class__", "__builtins__", "__new__"}:
            try:
                setattr(other, name, getattr(marked, name))
            except (AttributeError, TypeError):
                continue
    return named(marked, "look_up"), named(other, "refund")


@case
def the_code_of_a_marked_function_is_replaced() -> Pair:
    marked, changed = read_only(fresh()), read_only(fresh())

    def refund(order: str) -> str:
        """Refund."""
        RAN.append("refund")
        return order

    changed.__code__ = refund.__code__
    return named(marked, "look_up"), named(changed, "refund")


@case
def a_copied_tool() -> Pair:
    marked = read_only(named(fresh(), "look_up"))
    relative = copy.copy(marked)
    relative.name = "refund"
    return marked, relative


@case
def a_deeply_copied_tool() -> Pair:
    marked = read_only(named(fresh(), "look_up"))
    relative = copy.deepcopy(marked)
    relative.name = "refund"
    return marked, relative


@case
def a_pickled_tool() -> Pair:
    marked = read_only(Own(name="look_up"))
    relative = pickle.loads(pickle.dumps(marked))
    relative.name = "refund"
    return marked, relative


@case
def a_model_copy() -> Pair:
    marked = read_only(named(fresh(), "look_up"))
    return marked, renamed(marked)


@case
def a_model_copy_with_another_function() -> Pair:
    marked = named(read_only(fresh()), "look_up")
    return marked, renamed(marked, func=fresh())


@case
def a_model_copy_with_a_coroutine_besides() -> Pair:
    marked = named(read_only(fresh()), "look_up")

    async def refund(order: str) -> str:
        """Refund."""
        RAN.append("refund")
        return order

    return marked, renamed(marked, coroutine=refund)


@case
def a_tool_s_fields_are_copied() -> Pair:
    marked, relative = read_only(named(fresh(), "look_up")), named(fresh(), "refund")
    relative.__dict__.update({**marked.__dict__, "name": "refund"})
    return marked, relative


@case
def a_marked_tool_is_given_another_function() -> Pair:
    marked, changed = read_only(named(fresh(), "look_up")), read_only(named(fresh(), "refund"))
    changed.func = fresh()
    return marked, changed


@case
def a_marked_tool_is_given_a_coroutine() -> Pair:
    changed = read_only(named(fresh(), "refund"))

    async def refund(order: str) -> str:
        """Refund."""
        RAN.append("refund")
        return order

    changed.coroutine = refund
    return None, changed


@case
def a_marked_tool_s_method_is_hidden_by_its_instance() -> Pair:
    kind = marked_class()
    changed = kind(name="refund")
    changed.__dict__["_run"] = named(fresh(), "refund")._run
    return kind(name="look_up"), changed


@case
def a_subclass_of_a_marked_class() -> Pair:
    kind = marked_class()

    class Heir(kind):  # type: ignore[misc,valid-type]
        def _run(self, order: str) -> str:
            RAN.append("refund")
            return "refund"

    return kind(name="look_up"), Heir(name="refund")


@case
def a_subclass_without_changes() -> Pair:
    kind = marked_class()

    class Heir(kind):  # type: ignore[misc,valid-type]
        pass

    return kind(name="look_up"), Heir(name="refund")


@case
def another_instance_of_one_class() -> Pair:
    return read_only(Own(name="look_up")), Own(name="refund")


@case
def the_base_of_a_marked_class() -> Pair:
    return marked_class()(name="look_up"), Own(name="refund")


@case
def a_marked_class_is_given_another_method() -> Pair:
    kind, changed = marked_class(), marked_class()

    def refund(self: Any, order: str) -> str:
        RAN.append("refund")
        return "refund"

    changed._run = refund  # type: ignore[method-assign]
    return kind(name="look_up"), changed(name="refund")


@case
def a_marked_class_that_calls_any_function() -> Pair:
    @read_only
    class Calling(StructuredTool):
        """Marked, though what it calls is a field."""

    function = fresh()
    return None, Calling.from_function(function, name="refund", description="A tool.")


@case
def a_class_of_its_own_on_a_marked_function() -> Pair:
    class Doing(StructuredTool):
        def _run(self, *args: Any, config: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
            RAN.append("refund")
            return "refund"

    marked = read_only(fresh())
    return named(marked, "look_up"), Doing.from_function(marked, name="refund", description="A tool.")


def agent_with(ahead: RunAheadMiddleware, tools: list[BaseTool], *asked: dict[str, Any]) -> Any:
    answer = script(*(calls(one) for one in asked), AIMessage("done"))
    return create_agent(ScriptedChat(answer=answer), tools, middleware=[ahead])


def first_argument(made: BaseTool) -> str:
    """`Tool` calls its argument `__arg1`."""
    return "__arg1" if type(made) is Tool else "order"


def predicted(made: BaseTool) -> dict[str, Any]:
    return call(made.name, **{first_argument(made): "W7"})


@pytest.mark.parametrize("build", CASES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("given", ["by decorator", "by allow"])
def test_an_unmarked_relative_never_runs_unless_the_model_asks(build: Callable[[], Pair], given: str) -> None:
    marked, relative = build()
    allow = [marked] if given == "by allow" and marked is not None else []
    ahead = RunAheadMiddleware(allow, predict=in_turns([predicted(relative)]))
    asyncio.run(agent_with(ahead, [one for one in (marked, relative) if one is not None]).ainvoke(ASKED))
    assert (ahead.ledger.counts.started, RAN) == (0, [])


@pytest.mark.parametrize("build", CASES, ids=lambda one: one.__name__)
def test_an_unmarked_relative_runs_when_the_model_asks(build: Callable[[], Pair]) -> None:
    marked, relative = build()
    asked = predicted(relative)
    ahead = RunAheadMiddleware(predict=in_turns([asked]), listen=True)
    agent = agent_with(ahead, [one for one in (marked, relative) if one is not None], asked)
    found = asyncio.run(agent.ainvoke(ASKED))["messages"][-2]
    assert (found.status, ahead.ledger.counts.started) == ("success", 0)


@pytest.mark.parametrize("build", CASES, ids=lambda one: one.__name__)
def test_the_marked_one_runs_ahead(build: Callable[[], Pair]) -> None:
    marked, relative = build()
    if marked is None:
        return
    asked = predicted(marked)
    ahead = RunAheadMiddleware(predict=in_turns([asked]))
    asyncio.run(agent_with(ahead, [marked, relative], asked).ainvoke(ASKED))
    assert (ahead.ledger.counts.used, len(RAN)) == (1, 1)


def test_every_tool_of_a_marked_function_runs_ahead() -> None:
    """The function itself was declared to read, so it does not matter how many tools are made of it."""
    marked = read_only(fresh())
    for made in (named(marked, "one"), tool("other")(marked), copy.deepcopy(named(marked, "third"))):
        ahead = RunAheadMiddleware(predict=in_turns([predicted(made)]))
        agent_with(ahead, [made], predicted(made)).invoke(ASKED)
        assert ahead.ledger.counts.used == 1


def test_a_static_method_is_marked_below_its_decorator() -> None:
    class Orders:
        @staticmethod
        @read_only
        def look_up(order: str) -> str:
            """Look up."""
            return order

    made = named(Orders.look_up, "look_up")
    ahead = RunAheadMiddleware(predict=in_turns([predicted(made)]))
    agent_with(ahead, [made], predicted(made)).invoke(ASKED)
    assert ahead.ledger.counts.used == 1


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_descriptor_cannot_be_marked(kind: type) -> None:
    with pytest.raises(ConfigError, match="below"):
        read_only(kind(fresh()))


@pytest.mark.parametrize("kind", [BaseTool, StructuredTool, Tool])
def test_langchain_s_own_classes_cannot_be_marked(kind: type) -> None:
    with pytest.raises(ConfigError, match=kind.__name__):
        read_only(kind)


def test_what_cannot_be_called_cannot_be_marked() -> None:
    with pytest.raises(ConfigError, match="7"):
        read_only(7)


@pytest.mark.parametrize("given", ["allow", "arguments_from_tools"])
def test_a_function_on_the_list_is_that_function_and_not_its_name(given: str) -> None:
    """`functools.wraps` copies the name as well."""
    function = fresh()

    @functools.wraps(function)
    def wrapper(order: str) -> str:
        return function(order)

    made = {"listed": tool(function), "relative": tool(wrapper)}
    used = {}
    for name, one in made.items():
        settings: dict[str, Any] = {"allow": [function]}
        if given == "arguments_from_tools":
            settings = {"allow": ["act"], "arguments_from_tools": [function]}
        only_in_output = {"messages": [*ASKED["messages"], *_answered()]}
        ahead = RunAheadMiddleware(predict=lambda state, one=one: [call(one.name, order="C7")], **settings)
        agent_with(ahead, [one]).invoke(only_in_output if given == "arguments_from_tools" else ASKED)
        used[name] = ahead.ledger.counts.started
    assert used == {"listed": 1, "relative": 0}


def _answered() -> list[Any]:
    earlier = call("find", order="W7")
    return [calls(earlier), ToolMessage("its customer is C7", tool_call_id=earlier["id"], name="find")]


def test_a_method_marked_in_its_class_says_what_to_mark_instead() -> None:
    made = named(with_marked_method()("orders").call, "look_up")
    ahead = RunAheadMiddleware(predict=in_turns([predicted(made)]))
    agent_with(ahead, [made]).invoke(ASKED)
    assert "read_only(tool)" in ahead.refused["look_up"]
