"""An agent of two turns on a tiny random target, and a training of a judge on its runs that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from helpers.tiny_draft import tiny_target
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.text.traces import Trajectory
from precedent_research.judge_training import Agent, JudgeRecipe, JudgeTraining, TrainedOn
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

MAX_TOKENS = 6
RECIPE = JudgeRecipe(mismatches=24, strength=0.1)
RUNS = [
    Trajectory(number, f"task-{number}", f"task-{number}", ({"role": "user", "content": text},), ())
    for number, text in enumerate(["Where is it?", "Cancel it.", "Send it back.", "Thanks!", "Who?", "My name?"])
]


def tiny_draft() -> PreTrainedModel:
    """Another random model: it disagrees nearly everywhere."""
    return tiny_causal_lm(hidden_size=32, num_hidden_layers=1, seed=5)


def outcome(run: Trajectory, chat_model: Any) -> object:
    """Two turns; the outcome is a small number made of their bytes, so that some changes leave it as it is."""
    messages: list[Any] = list(run.messages)
    messages.append(chat_model.invoke(messages))
    messages.append({"role": "user", "content": f"So {len(messages[-1].text)}?"})
    answer = chat_model.invoke(messages)
    return value_of(messages[-2].text, answer.text)


def value_of(first: str, second: str) -> int:
    """What two answers come to."""
    return (sum(first.encode()) + sum(second.encode())) % 3


def agent(run: Any = outcome, name: str = "tiny") -> Agent:
    """The agent, on a chat model with short answers."""
    return Agent(name, run, chat_model, MAX_TOKENS, CostCurve())


def chat_model(engine: Any) -> ChatPrecedent:
    """Greedy, with short answers."""
    return ChatPrecedent.from_engine(engine, temperature=0.0, max_tokens=MAX_TOKENS)


def train_tiny_judge(out: Path, recipe: JudgeRecipe = RECIPE, run: Any = outcome, **settings: Any) -> TrainedOn:
    """Train a judge in the folder `out`."""
    training = JudgeTraining(
        tiny_target(), tiny_draft(), byte_tokenizer(), settings.pop("runs", RUNS), agent(run), recipe, out, **settings
    )
    return training.run()


def made() -> Any:
    """The outcome, as `module:factory` names it."""
    return outcome
