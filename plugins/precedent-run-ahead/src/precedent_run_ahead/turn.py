"""One call of the model: what may come next is started before it, and compared with its answer after it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from langchain.agents.middleware import ModelRequest
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs, var_child_runnable_config
from langchain_core.tools import BaseTool

from precedent.cache import SpeculationCache
from precedent.langchain.chat_model import ChatPrecedent
from precedent_run_ahead.actions.calls import Call, Prediction
from precedent_run_ahead.actions.ledger import Lane
from precedent_run_ahead.actions.live import Live
from precedent_run_ahead.actions.memory import predict, recalled, seconds_by_tool
from precedent_run_ahead.actions.price import TrackRecord, Worth
from precedent_run_ahead.aids import MEMORY, PREDICT, Aids
from precedent_run_ahead.beside import Agent, others_speak, over_limit
from precedent_run_ahead.equality import key_of
from precedent_run_ahead.hearing import STREAM, Hearing, Listening
from precedent_run_ahead.recording import plain_messages
from precedent_run_ahead.running import Ahead, Chain, Refusal, Runner
from precedent_run_ahead.settings import Predictor, Settings

OWN = "own"
MOST_PREDICTIONS = 1000
"""Of a caller's own predictor, for one answer of the model."""

OWN_ESTIMATE = 0.75
"""The probability of a caller's own prediction before the first has come true."""

Start = Callable[[Ahead, Chain], None]


@dataclass(slots=True)
class Turn:
    """A model call of one run. `start` starts a call on a thread or a task; `refusal` says why a tool may not."""

    settings: Settings
    agent: Agent
    request: ModelRequest[Any]
    config: RunnableConfig
    lane: Lane
    tenant: str
    runner: Runner
    start: Start
    refusal: Refusal
    worth: Worth
    record: TrackRecord
    aids: Aids
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
        settings, found = self.settings, list[Prediction]()
        if (cache := settings.cache) is not None:
            found += self.aids.waited(MEMORY, lambda: self._remembered(cache), [])
        if (predictor := settings.predict) is not None:
            found += self.aids.waited(PREDICT, lambda: self._own(predictor), [])
        return found

    def _remembered(self, cache: SpeculationCache) -> list[Prediction]:
        found = recalled(cache, self.messages, self.tenant)
        for name, seconds in seconds_by_tool(found).items():
            if self.worth.tools.of(name) is None:
                self.worth.tools.observe(name, seconds)
        return predict(found, self.live)

    def _own(self, predictor: Predictor) -> list[Prediction]:
        calls = list(islice(predictor(self.request.state), MOST_PREDICTIONS))
        return [Prediction(Call(call["name"], dict(call["args"])), OWN_ESTIMATE, OWN) for call in calls]

    def consider(self, predictions: Sequence[Prediction]) -> None:
        """Start the predictions that may start and that pay."""
        for prediction in predictions:
            self._consider(prediction)

    def hear(self, call: Call) -> None:
        """The model has written a whole call, and goes on writing."""
        self.aids.run(lambda: self._consider(Prediction(call, 1.0, STREAM)), None)
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
        probability = 1.0 if source == STREAM else self.record.probability(source, prediction.probability)
        if self.worth.pays(call.name, probability):
            self._start(tool, prediction, key)

    def _refusal_of(self, prediction: Prediction, tool: BaseTool) -> str | None:
        """Return why a predicted call may not run ahead with this tool, to which other middleware may have sent it."""
        open_ = prediction.source == STREAM or self.settings.allowed.takes_tool_output(tool)
        if not open_ and self.live.from_tools(prediction.call):
            return "its arguments come from another tool's output"
        return self.refusal(tool)

    def _start(self, tool: BaseTool, prediction: Prediction, key: str) -> None:
        call = prediction.call
        pending = self.runner.ledger.begin(self.lane, tool, call.name, key, prediction.source)
        if pending is not None:
            refusal = functools.partial(self._refusal_of, prediction)
            ahead = Ahead(pending, call, tool, refusal, self.request.state, self.config, self.request.runtime)
            self.start(ahead, self.agent.middleware)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the model's answer while it is written, if it streams; a model of ours is made to."""
        listen = self.settings.listen
        streams = isinstance(self.request.model, ChatPrecedent) if listen is None else listen
        heard = RunnableConfig(callbacks=[(Listening if streams else Hearing)(self.hear)])
        heard = RunnableConfig() if others_speak(self.agent, self.runner.own) else heard
        token = var_child_runnable_config.set(merge_configs(self.config, heard))
        begun = time.perf_counter()
        try:
            yield
        finally:
            var_child_runnable_config.reset(token)
        self.worth.model.observe("", time.perf_counter() - begun)

    def answered(self, messages: Sequence[BaseMessage]) -> None:
        """Learn which predictions have come true."""
        tools = {tool.name: tool for tool in self.request.tools if isinstance(tool, BaseTool)}
        made = {
            (call["name"], key_of(tools[call["name"]], call["args"]))
            for message in messages
            if isinstance(message, AIMessage)
            for call in message.tool_calls
            if call["name"] in tools and self.settings.allowed.holds(tools[call["name"]])
        }
        before = {key: one for key, one in self._predicted.items() if one.source != STREAM}
        for key, prediction in before.items():
            self.record.observe(prediction.source, prediction.probability, key in made)
        self.runner.ledger.asked(len(made), len(made & before.keys()))
