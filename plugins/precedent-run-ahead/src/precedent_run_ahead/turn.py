"""One call of the model: what may come next is started before it, heard while it writes, and compared with its answer.

All of it stands behind a fence: a fault costs an agent nothing but the time that it would have saved.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from uuid import UUID

from langchain.agents.middleware import ModelRequest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessageChunk, ToolCall
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs, var_child_runnable_config
from langchain_core.tools import BaseTool

from precedent.cache import Completion, SpeculationCache
from precedent.langchain.chat_model import ChatPrecedent
from precedent_run_ahead.actions.calls import Call, Prediction
from precedent_run_ahead.actions.decisions import decided, query_of, stored
from precedent_run_ahead.actions.ledger import Lane
from precedent_run_ahead.actions.live import Live, Message, read
from precedent_run_ahead.actions.memory import predict, recalled, seconds_by_tool
from precedent_run_ahead.beside import Agent, others_speak, over_limit
from precedent_run_ahead.recording import plain_messages, plain_tools
from precedent_run_ahead.running import MEMORY, PREDICT, Ahead, Predictor, Shared, key_of

STREAM, OWN = "stream", "own"
"""Sources of predictions: what the model writes, and the caller's own predictor; the other is memory."""

MOST_PREDICTIONS = 1000
"""Of a caller's own predictor, for one answer of the model."""

OWN_ESTIMATE = 0.75
"""The probability of a caller's own prediction before the first has come true."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of the model: what it was asked, the calls that it made, and the tools that were offered."""

    messages: tuple[Message, ...]
    calls: tuple[ToolCall, ...]
    tools: tuple[Any, ...]

    def record(self, seconds: Mapping[str, float], tenant: str) -> Completion:
        """The answer as a record of the speculation cache; `seconds` are those of calls, by id, 0 if unknown."""
        shown = [tool.get("function", tool) for tool in plain_tools({"tools": self.tools})]
        schemas = {str(one.get("name")): one.get("parameters") or {} for one in shown}
        calls = [Call(call["name"], call["args"]) for call in self.calls]
        took = [seconds.get(call["id"] or "", 0.0) for call in self.calls]
        return stored(decided(self.messages, calls, schemas, took), query_of(self.messages), tenant)


@dataclass(slots=True)
class Turn:
    """A model call of one run, of an agent in the event loop `loop` (None: on a thread).

    `refusal` says why a tool may not run ahead.
    """

    shared: Shared
    agent: Agent
    request: ModelRequest[Any]
    config: RunnableConfig
    lane: Lane
    tenant: str
    loop: asyncio.AbstractEventLoop | None
    refusal: Callable[[BaseTool], str | None]
    live: Live = field(init=False)
    messages: tuple[Mapping[str, Any], ...] = field(init=False)
    _made: list[str] = field(default_factory=list)
    _predicted: dict[tuple[str, str], Prediction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        system = self.request.system_message
        shown = [*([system] if system is not None else []), *self.request.messages]
        self.messages = tuple(plain_messages(shown))
        self.live = Live(self.messages)

    def predictions(self) -> list[Prediction]:
        """What memory and the caller's own predictor say, in this order."""
        found, aids = list[Prediction](), self.shared.aids
        if (cache := self.shared.cache) is not None:
            found += aids.waited(MEMORY, lambda: self._remembered(cache), [])
        if (predictor := self.shared.predict) is not None:
            found += aids.waited(PREDICT, lambda: self._own(predictor), [])
        return found

    def _remembered(self, cache: SpeculationCache) -> list[Prediction]:
        found = recalled(cache, self.messages, self.tenant)
        for name, seconds in seconds_by_tool(found).items():
            if name not in self.shared.worth.tools:
                self.shared.worth.took(name, seconds)
        return predict(found, self.live)

    def _own(self, predictor: Predictor) -> list[Prediction]:
        calls = list(islice(predictor(self.request.state), MOST_PREDICTIONS))
        return [Prediction(Call(call["name"], dict(call["args"])), OWN_ESTIMATE, OWN) for call in calls]

    def consider(self, predictions: Sequence[Prediction]) -> None:
        """Start the predictions that may start and that pay."""

        def consider() -> None:
            for prediction in predictions:
                self._consider(prediction)

        self.shared.aids.run(consider, None)

    def hear(self, call: Call) -> None:
        """The model has written a whole call, and goes on writing."""
        self.shared.aids.run(lambda: self._consider(Prediction(call, 1.0, STREAM)), None)
        self._made.append(call.name)

    def _consider(self, prediction: Prediction) -> None:
        call, source = prediction.call, prediction.source
        tool = next((one for one in self.request.tools if isinstance(one, BaseTool) and one.name == call.name), None)
        if tool is None or self.refusal(tool):
            return
        key = key_of(tool, dict(call.arguments))
        if key is None:
            return
        self._predicted.setdefault((call.name, key), prediction)
        if self._refusal_of(prediction, tool):
            return
        started = [*self._made, *(one.name for one in self.lane.waiting)]
        if over_limit(self.agent, call.name, self.request.state, started if source != STREAM else self._made):
            return
        probability = 1.0 if source == STREAM else self.shared.record.probability(source, prediction.probability)
        if not self.shared.worth.pays(call.name, probability):
            return
        pending = self.shared.ledger.begin(self.lane, tool, call.name, key, source)
        if pending is not None:
            refusal = functools.partial(self._refusal_of, prediction)
            chain, about = self.agent.middleware, (self.request.state, self.config, self.request.runtime)
            Ahead(self.shared, chain, pending, call, tool, refusal, *about).start(self.loop)

    def _refusal_of(self, prediction: Prediction, tool: BaseTool) -> str | None:
        """Return why a predicted call may not run ahead with this tool, to which other middleware may have sent it."""
        open_ = prediction.source == STREAM or self.shared.allowed.takes_tool_output(tool)
        if not open_ and self.live.from_tools(prediction.call):
            return "its arguments come from another tool's output"
        return self.refusal(tool)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the model's answer while it is written, if it streams; a model of ours is made to."""
        listen = self.shared.listen
        streams = isinstance(self.request.model, ChatPrecedent) if listen is None else listen
        heard = RunnableConfig(callbacks=[(Listening if streams else Hearing)(self.hear)])
        heard = RunnableConfig() if others_speak(self.agent, self.shared.own) else heard
        token = var_child_runnable_config.set(merge_configs(self.config, heard))
        begun = time.perf_counter()
        try:
            yield
        finally:
            var_child_runnable_config.reset(token)
        self.shared.worth.model_took(time.perf_counter() - begun)

    def answered(self, calls: Sequence[ToolCall]) -> None:
        """Learn which predictions have come true."""
        tools = {tool.name: tool for tool in self.request.tools if isinstance(tool, BaseTool)}
        made = {
            (call["name"], key_of(tools[call["name"]], call["args"]))
            for call in calls
            if call["name"] in tools and self.shared.allowed.holds(tools[call["name"]])
        }
        before = {key: one for key, one in self._predicted.items() if one.source != STREAM}
        for key, prediction in before.items():
            self.shared.record.observe(prediction.source, prediction.probability, key in made)
        self.shared.ledger.asked(len(made), len(made & before.keys()))


class Hearing(BaseCallbackHandler):
    """Calls `complete` with each tool call of the answer as soon as its arguments are a whole JSON object.

    Hears the agent's model alone: a model that starts while it is asked is one that it asks itself. A model that
    streams to somebody else is heard as well; `Listening` makes it stream.
    """

    run_inline = True

    def __init__(self, complete: Callable[[Call], None]) -> None:
        self._complete = complete
        self._heard: UUID | None = None
        self._names: dict[tuple[UUID, Any], str] = {}
        self._written: dict[tuple[UUID, Any], str] = {}
        self._told: set[tuple[UUID, Any]] = set()

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Begin to hear the model, unless another is being heard."""
        self._heard = self._heard or run_id

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Stop hearing the model."""
        self._heard = None if self._heard == run_id else self._heard

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Stop hearing a model that failed: it may be asked again, or another in its place."""
        self._heard = None if self._heard == run_id else self._heard

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        """Add what the chunk says of the answer's calls."""
        message = getattr(chunk, "message", None) if run_id == self._heard else None
        for piece in message.tool_call_chunks if isinstance(message, AIMessageChunk) else ():
            place = run_id, piece.get("index")
            self._names[place] = self._names.get(place, "") + (piece.get("name") or "")
            self._written[place] = self._written.get(place, "") + (piece.get("args") or "")
            arguments = read(self._written[place])
            untold = place[1] is not None and place not in self._told and self._names[place]
            if untold and isinstance(arguments, dict):
                self._told.add(place)
                self._complete(Call(self._names[place], arguments))


class Listening(Hearing):
    """A `Hearing` for which LangChain streams the model's answer, as it does for `astream_events`."""

    def tap_output_aiter(self, run_id: UUID, output: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Part of what LangChain knows such handlers by; the output passes."""
        return output

    def tap_output_iter(self, run_id: UUID, output: Iterator[Any]) -> Iterator[Any]:
        """The same for a synchronous stream."""
        return output
