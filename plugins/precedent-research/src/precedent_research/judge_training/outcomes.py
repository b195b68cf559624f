"""Outcomes: what an agent run comes to, as whoever owns the agent tells it; a judge learns which tokens change it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from precedent.errors import ConfigError
from precedent.text.traces import Trajectory

GROUP = "precedent.outcomes"
"""Entry points: factories without arguments that return an `Outcome`."""

TEXT = "text"

Outcome = Callable[[Trajectory, Any], object]
"""`(run, chat_model) -> outcome`: runs the recorded agent run once more on a LangChain chat model.

It must be repeatable: the same answers of the chat model must lead to the same prompts, and to an equal outcome. So it
begins each time with tools in the same state. Outcomes are compared by `==`; None says that the run failed, and runs
that fail without a draft are left out. An error that an answer may cause is part of the outcome: catch it and return
it; what is raised ends the training.
"""


def load_outcome(name: str) -> Outcome:
    """The outcome called `name`: `text`, an installed one, or `module:factory`.

    Raises ConfigError, naming those that are installed, if there is none.
    """
    if name == TEXT:
        return last_lines
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is not None:
        return _made(name, found.load)
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _made(name, lambda: getattr(importlib.import_module(module), attribute))
    known = ", ".join(sorted({TEXT, *(entry.name for entry in entry_points(group=GROUP))}))
    raise ConfigError(f"no outcome is called {name!r} (installed: {known}); or write module:factory")


def _made(name: str, load: Callable[[], Callable[[], Outcome]]) -> Outcome:
    try:
        return load()()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the outcome {name!r} cannot be loaded: {error}") from error


def last_lines(run: Trajectory, chat_model: Any) -> object:
    """The outcome of runs without tools to run: the last line of the answer at every recorded turn.

    Words before an answer's last line may change, letter case and spaces may change anywhere.
    """
    bound = chat_model.bind_tools(list(run.tools)) if run.tools else chat_model
    return tuple(_last_line(bound.invoke(list(messages)).text) for messages in prompts_of(run))


def prompts_of(run: Trajectory) -> list[tuple[dict[str, Any], ...]]:
    """The messages before each answer of a run; only before the last one if the run is a single call."""
    places = [place for place, message in enumerate(run.messages) if message["role"] == "assistant" and place]
    return [run.messages[:place] for place in (places[-1:] if run.only_last else places)]


def _last_line(text: str) -> str:
    lines = [" ".join(line.split()).lower() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
