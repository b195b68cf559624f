"""Chooses the prompts that `precedent bench` measures and those that warm the cache."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.errors import PromptError
from precedent.text.prompt import render_prompt
from precedent.text.traces import read_trajectories
from precedent_replay.turns import message_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TRAJECTORIES = 400

LONGEST_SYSTEM_TEXT = 600
"""Characters kept of a system message: real policies are too long for a small model."""

TOPICS = (
    "Why is the sky blue at noon and red in the evening?",
    "Write a short poem about a lighthouse keeper.",
    "Explain how a bill becomes law in two sentences.",
    "Give me a recipe for lentil soup with four ingredients.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: the train leaves at half past nine.",
    "Write a Python function that reverses a linked list.",
    "Who painted the ceiling of the Sistine Chapel, and when?",
    "A farmer has 17 sheep and all but 9 run away. How many are left?",
    "Suggest three names for a bakery in a harbour town.",
    "Summarise the plot of Romeo and Juliet for a child.",
    "How do I remove a red wine stain from a wool carpet?",
    "List the planets of the solar system by size.",
    "Write a polite e-mail that declines an invitation.",
    "What causes inflation, and how do central banks react?",
    "Describe the taste of a mango to someone who never had one.",
)
"""Unrelated questions: traffic for which a cache cannot help."""


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """The messages before one recorded assistant turn; `task` is shared by all trajectories of one task."""

    task: str
    trajectory: int
    messages: tuple[dict[str, Any], ...]


def read_prompts(path: Path) -> list[TracePrompt]:
    """The prompts of all assistant turns in the first trajectories, as plain text that any chat template accepts."""
    return [
        TracePrompt(run.task, run.number, tuple(map(_plain, run.messages[:turn])))
        for run in islice(read_trajectories([path]), MOST_TRAJECTORIES)
        for turn, message in enumerate(run.messages)
        if message["role"] == "assistant" and turn > 0
    ]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    role = message["role"] if message["role"] in ("system", "user", "assistant") else "user"
    text = message_text(message)
    return {"role": role, "content": text[:LONGEST_SYSTEM_TEXT] if role == "system" else text}


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Token ids of the measured and the warming prompts, and how many were left out or truncated for their length."""

    measured: list[list[int]]
    warming: list[list[int]]
    source: str = "order desk"
    left_out: int = 0
    truncated: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Counts for the JSON results."""
        cut = LONGEST_SYSTEM_TEXT if self.source not in ("order desk", "topics") else None
        return {
            "source": self.source,
            "measured": len(self.measured),
            "warming": len(self.warming),
            "prompt_tokens": [len(ids) for ids in self.measured],
            "left_out_as_too_long": self.left_out,
            "truncated": self.truncated,
            "system_turn_cut_at_characters": cut,
        }


def trace_prompts(
    traces: Path, tokenizer: PreTrainedTokenizerBase, measured: int, warming: int, longest: int, *, truncate: bool
) -> PromptSet:
    """Prompts of recorded assistant turns. Each task's last trajectory is measured; its others warm the cache.

    Prompts of more than `longest` tokens are left out; with `truncate` they lose their oldest messages after the
    system turn instead. Raises PromptError if no prompt is short enough.
    """
    fitting = _Fitting(tokenizer, longest, truncate)
    chosen, warm = ([ids for _, ids in found] for found in _recorded(traces, fitting, measured, warming, True))
    return PromptSet(chosen, warm, traces.name, fitting.left_out, fitting.truncated)


def recorded_turns(
    traces: Path, tokenizer: PreTrainedTokenizerBase, measured: int, warming: int, longest: int, *, same_task: bool
) -> tuple[list[TracePrompt], list[TracePrompt]]:
    """The same prompts as messages, none truncated; without `same_task` other tasks' prompts warm the cache."""
    fitting = _Fitting(tokenizer, longest, truncate=False)
    chosen, warm = _recorded(traces, fitting, measured, warming, same_task)
    return [prompt for prompt, _ in chosen], [prompt for prompt, _ in warm]


Fitted = list[tuple[TracePrompt, list[int]]]


def _recorded(traces: Path, fitting: _Fitting, measured: int, warming: int, same_task: bool) -> tuple[Fitted, Fitted]:
    prompts = read_prompts(traces)
    last = {prompt.task: prompt.trajectory for prompt in prompts}
    chosen = fitting.first(_spread([p for p in prompts if p.trajectory == last[p.task]], measured), measured)
    if not chosen:
        raise PromptError(f"{traces} has no assistant turn whose prompt is at most {fitting.longest} tokens long")
    if same_task:
        others = [prompt for prompt in prompts if prompt.trajectory != last[prompt.task]]
        return chosen, fitting.first(_nearest_turns([prompt for prompt, _ in chosen], others), warming)
    tasks = {prompt.task for prompt, _ in chosen}
    return chosen, fitting.first(_spread([p for p in prompts if p.task not in tasks], warming), warming)


class _Fitting:
    """Renders prompts and keeps those that are short enough; counts the prompts that it drops or truncates."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, longest: int, truncate: bool) -> None:
        self._tokenizer, self.longest, self._truncate = tokenizer, longest, truncate
        self.left_out, self.truncated = 0, 0

    def first(self, prompts: Iterable[TracePrompt], count: int) -> Fitted:
        """The first `count` prompts that fit, with their token ids."""
        fitted = ((prompt, ids) for prompt in prompts if (ids := self._ids(prompt.messages)) is not None)
        return list(islice(fitted, count))

    def _ids(self, messages: Sequence[dict[str, Any]]) -> list[int] | None:
        """Drop as few of the oldest messages as possible; keep the system turn and the last message."""
        head = [message for message in messages[:1] if message["role"] == "system"]
        rest = list(messages[len(head) :])

        def without(dropped: int) -> list[int]:
            return render_prompt(self._tokenizer, [*head, *rest[dropped:]], None)

        dropped, ids = 0, without(0)
        if len(ids) > self.longest:
            fits = range(len(rest)) if self._truncate else range(0)
            dropped = bisect_left(fits, True, key=lambda number: len(without(number)) <= self.longest)
            if dropped == len(fits):
                self.left_out += 1
                return None
            self.truncated += 1
        return without(dropped) if dropped else ids


def _spread(prompts: Sequence[TracePrompt], count: int) -> Iterator[TracePrompt]:
    """All prompts in strides: first `count` of them spread evenly over the file, then their successors, and so on."""
    stride = max(1, len(prompts) // count)
    for start in range(stride):
        yield from prompts[start::stride][:count]


def _nearest_turns(chosen: Sequence[TracePrompt], others: Sequence[TracePrompt]) -> Iterator[TracePrompt]:
    """Prompts of the same tasks from other trajectories: for each chosen prompt in turn, the next nearest by turn."""
    ranked = [
        sorted((o for o in others if o.task == prompt.task), key=lambda o: abs(len(o.messages) - len(prompt.messages)))
        for prompt in chosen
    ]
    seen: set[int] = set()
    for place in range(max(map(len, ranked), default=0)):
        for row in ranked:
            if place < len(row) and id(row[place]) not in seen:
                seen.add(id(row[place]))
                yield row[place]


def topic_prompts(tokenizer: PreTrainedTokenizerBase, measured: int, warming: int) -> PromptSet:
    """Questions on unrelated topics; those not measured warm the cache."""
    rendered = [render_prompt(tokenizer, [{"role": "user", "content": text}], None) for text in TOPICS]
    return PromptSet(rendered[:measured], rendered[measured:][:warming], "topics")


def order_desk_prompts(tokenizer: PreTrainedTokenizerBase, measured: int, warming: int) -> PromptSet:
    """First turns of the demo's requests: set A warms the cache, set B is measured."""
    try:
        from precedent_demo import SYSTEM_PROMPT, make_database, make_requests, make_tools
    except ImportError:
        raise PromptError(
            "the order desk is not installed: give --traces FILE, or pip install ./plugins/precedent-demo"
        ) from None
    from langchain_core.utils.function_calling import convert_to_openai_tool

    system, tools = {"role": "system", "content": SYSTEM_PROMPT}, make_tools(make_database(seed=0))
    schemas = [convert_to_openai_tool(tool) for tool in tools]
    warm, asked = (
        [
            render_prompt(tokenizer, [system, {"role": "user", "content": request.opening}], schemas)
            for request in make_requests(name, full=False, seed=0)
        ]
        for name in ("A", "B")
    )
    return PromptSet(asked[:measured], warm[:warming])
