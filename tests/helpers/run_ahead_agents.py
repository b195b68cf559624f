"""Agents with middleware that runs tools ahead, and the ways to run them."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.tools import StructuredTool

from helpers.scripted_agents import Answer, Desk, ScriptedChat, call, calls, script, transcript

W7, W8 = call("look_up", order="W7"), call("look_up", order="W8")
CHANGE = call("change", order="W7")
ASKED = {"messages": [HumanMessage("W7, please")]}
READS = ("look_up", "customer")

Run = Callable[..., list[Any]]
WAYS = ("sync", "async", "stream", "astream")


def in_turns(*predicted: list[dict[str, Any]]) -> Callable[[Any], list[dict[str, Any]]]:
    """A predictor: which calls it names follows from how many answers the state holds."""

    def predict(state: Any) -> list[dict[str, Any]]:
        given = sum(isinstance(message, AIMessage) for message in state["messages"])
        return predicted[given] if given < len(predicted) else []

    return predict


def way(name: str) -> Run:
    """Runs an agent in one of four ways (`WAYS`), and returns the messages at its end."""

    def last(states: list[Any]) -> list[Any]:
        return states[-1]["messages"]

    async def streamed(agent: Any, asked: Any, **options: Any) -> list[Any]:
        return [state async for state in agent.astream(asked, stream_mode="values", **options)]

    ways: dict[str, Run] = {
        "sync": lambda agent, asked=ASKED, **options: agent.invoke(asked, **options)["messages"],
        "async": lambda agent, asked=ASKED, **options: asyncio.run(agent.ainvoke(asked, **options))["messages"],
        "stream": lambda agent, asked=ASKED, **o: last(list(agent.stream(asked, stream_mode="values", **o))),
        "astream": lambda agent, asked=ASKED, **options: last(asyncio.run(streamed(agent, asked, **options))),
    }
    return ways[name]


def saying(*turns: dict[str, Any] | list[dict[str, Any]]) -> Answer:
    """The script of a model that makes these calls, turn by turn, and then says "ok"."""
    return script(*(calls(*(turn if isinstance(turn, list) else [turn])) for turn in turns), AIMessage("ok"))


def once(ready: Callable[[], Any], answer: Answer) -> Answer:
    """The same answers, each given once something is true: what runs ahead has got so far by then."""

    def waiting(messages: Sequence[BaseMessage]) -> AIMessage:
        until = time.monotonic() + 30
        while not ready() and time.monotonic() < until:
            time.sleep(0.001)
        return answer(messages)

    return waiting


def reading(act: Callable[[str], Any], name: str = "look_up", **options: Any) -> StructuredTool:
    """A tool that answers what a function or coroutine function makes of its order."""
    made: Any = {"coroutine" if inspect.iscoroutinefunction(act) else "func": act}
    return StructuredTool.from_function(**made, name=name, description="A tool.", **options)


def agent_on(tools: Any, answer: Answer, *middleware: Any, **options: Any) -> Any:
    return create_agent(ScriptedChat(answer=answer), tools, middleware=middleware, **options)


def agent_of(desk: Desk, answer: Answer, *middleware: Any, **options: Any) -> Any:
    return agent_on(list(desk.tools().values()), answer, *middleware, **options)


def plain(answer: Any, **options: Any) -> list[Any]:
    """The messages of the same agent without the middleware."""
    found: list[Any] = agent_of(Desk(), answer).invoke(ASKED, **options)["messages"]
    return transcript(found)


def join_runs_ahead() -> None:
    """Wait until no call runs ahead on a thread."""
    for thread in threading.enumerate():
        if thread.name.startswith("run-ahead"):
            thread.join(30)
