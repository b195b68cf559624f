"""Which prompts `precedent bench` measures, and which ones warm the cache before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.cli.traces import TracePrompt, read_prompts
from precedent.errors import PromptError
from precedent.text.prompt import render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TRAJECTORIES = 400


def load_prompts(
    traces: Path | None, tokenizer: PreTrainedTokenizerBase, measured: int, warming: int, longest: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the warming and of the measured prompts; of one task, only its last trial is measured."""
    if traces is None:
        return _order_desk(tokenizer, measured, warming)
    prompts = read_prompts(traces, most_trajectories=MOST_TRAJECTORIES)
    last = {prompt.task: prompt.trajectory for prompt in prompts}
    short = [(prompt, ids) for prompt in prompts if len(ids := _ids(tokenizer, prompt)) <= longest]
    to_measure = _spread([(p, ids) for p, ids in short if p.trajectory == last[p.task]], measured)
    tasks = {prompt.task for prompt, _ in to_measure}
    to_warm = [ids for p, ids in short if p.task in tasks and p.trajectory != last[p.task]][:warming]
    if not to_measure:
        raise PromptError(f"{traces} has no assistant turn whose prompt is at most {longest} tokens long")
    return to_warm, [ids for _, ids in to_measure]


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: TracePrompt) -> list[int]:
    return render_prompt(tokenizer, list(prompt.messages), None)


def _spread(prompts: Sequence[tuple[TracePrompt, list[int]]], count: int) -> list[tuple[TracePrompt, list[int]]]:
    """`count` prompts, evenly over the file."""
    step = max(1, len(prompts) // count)
    return list(prompts[::step][:count])


def _order_desk(
    tokenizer: PreTrainedTokenizerBase, measured: int, warming: int
) -> tuple[list[list[int]], list[list[int]]]:
    """First turns of the demo's requests: set A warms, set B is measured."""
    try:
        from precedent_demo import SYSTEM_PROMPT, make_database, make_requests, make_tools
    except ImportError:
        raise PromptError(
            "give --traces FILE, or install the order desk: pip install ./plugins/precedent-demo"
        ) from None
    from langchain_core.utils.function_calling import convert_to_openai_tool

    tools = [convert_to_openai_tool(tool) for tool in make_tools(make_database(seed=0))]

    def ids(request: Any) -> list[int]:
        texts = [{"role": "user", "content": text} for text in request.script[0].messages]
        return render_prompt(tokenizer, [{"role": "system", "content": SYSTEM_PROMPT}, *texts], tools)

    warm = [ids(request) for request in make_requests("A", full=False, seed=0)][:warming]
    return warm, [ids(request) for request in make_requests("B", full=False, seed=0)][:measured]
