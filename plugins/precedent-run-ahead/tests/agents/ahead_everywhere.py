"""A pytest plugin that gives every agent of LangChain's own tests a middleware more, last in its list.

`--ahead idle` is a middleware that does nothing in the hooks that ours has, and writes the models' calls into `--calls
FILE`; `--ahead nothing` is `RunAheadMiddleware` without predictions; `--ahead calls` predicts the calls in that file.
Every tool counts as read-only. `--outcomes FILE` gets what became of each test, and how much ran ahead.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import langchain.agents
import pytest
from langchain.agents import factory
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage

from precedent.errors import PrecedentError
from precedent_run_ahead import RunAheadMiddleware

CREATE = factory.create_agent
Calls = list[dict[str, Any]]
OUTCOMES: dict[str, str] = {}


class Idle(AgentMiddleware):
    """The hooks of `RunAheadMiddleware`, which only write down answers: what LangChain does for any that has them."""

    def __init__(self, answered: Callable[[Any], None]) -> None:
        super().__init__()
        self._answered = answered

    def before_agent(self, state: Any, runtime: Any) -> None: ...

    def after_agent(self, state: Any, runtime: Any) -> None: ...

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        response = handler(request)
        self._answered(response)
        return response

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        response = await handler(request)
        self._answered(response)
        return response

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        return await handler(request)


class Everywhere:
    """What the current test's agents predict and record, what ran ahead in all tests, and what became of each."""

    def __init__(self, ahead: str, calls: Path) -> None:
        self.ahead, self.calls = ahead, calls
        self.known: dict[str, list[Calls]] = json.loads(calls.read_text()) if ahead == "calls" else {}
        self.made = defaultdict[str, list[Calls]](list)
        self.agents: list[RunAheadMiddleware] = []
        self.test = ""

    def predict(self, state: Any) -> Calls:
        """The calls that this test's models made after as many answers."""
        turns = self.known.get(self.test, [])
        given = sum(isinstance(message, AIMessage) for message in state["messages"])
        return [dict(call) for call in turns[given]] if given < len(turns) else []

    def create_agent(self, model: Any, tools: Any = None, *, middleware: Any = (), **options: Any) -> Any:
        return CREATE(model, tools, middleware=[*middleware, self.middleware(tools)], **options)

    def middleware(self, tools: Any) -> AgentMiddleware[Any, Any, Any]:
        if self.ahead == "idle":
            return Idle(self.answered)
        ahead = RunAheadMiddleware(readable(tools), predict=self.predict)
        self.agents.append(ahead)
        return ahead

    def answered(self, response: Any) -> None:
        calls = [call for message in response.result for call in getattr(message, "tool_calls", [])]
        self.made[self.test].append([dict(call) for call in calls])

    def write(self, path: Path) -> None:
        if self.ahead == "idle":
            self.calls.write_text(json.dumps(self.made, default=str))
        counts = [ahead.ledger.counts for ahead in self.agents]
        started, used = sum(count.started for count in counts), sum(count.used for count in counts)
        path.write_text(json.dumps({"agents": len(counts), "started": started, "used": used, "tests": OUTCOMES}))


def readable(tools: Any) -> list[Any]:
    """The tools that may stand on the list."""
    found: list[Any] = []
    for tool in tools or []:
        try:
            RunAheadMiddleware([tool])
        except PrecedentError:
            continue
        found.append(tool)
    return found


EVERYWHERE = pytest.StashKey[Everywhere]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ahead", choices=("idle", "nothing", "calls"), required=True)
    parser.addoption("--calls", type=Path, required=True)
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """Replace `create_agent` before any test imports it, and listen to answers."""
    config.stash[EVERYWHERE] = everywhere = Everywhere(config.option.ahead, config.option.calls)
    factory.create_agent = functools.wraps(CREATE)(functools.partial(everywhere.create_agent))
    langchain.agents.create_agent = factory.create_agent


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst of a test's three phases."""
    if report.outcome != "passed" or report.when == "call":
        OUTCOMES[report.nodeid] = report.outcome


@pytest.fixture(autouse=True)
def _of_this_test(request: pytest.FixtureRequest) -> None:
    request.config.stash[EVERYWHERE].test = request.node.nodeid


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[EVERYWHERE].write(session.config.option.outcomes)
