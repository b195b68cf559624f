"""The order desk for `precedent train-judge`: the outcome of a recorded conversation, and the shipped judges.

precedent train-judge --target smollm2-135m-order-desk --runs desk.jsonl --outcome order-desk --out judge
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.errors import PromptError
from precedent_demo import make_database
from precedent_demo.conversation import run_request
from precedent_demo.desk import OrderDesk
from precedent_demo.requests import Request
from precedent_demo.workflows import SPLITS, generate_requests

if TYPE_CHECKING:
    from precedent.text.traces import Trajectory
    from precedent_research.judge import TrainedJudge

_TASK = re.compile(rf"(?P<set>{'|'.join(SPLITS)})(?P<number>\d+)(/(?P<seed>\d+))?")


class DeskOutcome:
    """The outcome of a conversation: its database row by row; None if that, or a fact that was to be told, is wrong."""

    def __init__(self) -> None:
        self._desks: dict[tuple[str, int], tuple[OrderDesk, list[Request]]] = {}

    def __call__(self, run: Trajectory, chat_model: Any) -> object:
        """Serve the request of a recorded run once more. Raises PromptError for a run of something else."""
        desk, request = self._request(run)
        transcript = run_request(chat_model, request, desk)
        return transcript.state if transcript.solved_by_model else None

    def _request(self, run: Trajectory) -> tuple[OrderDesk, Request]:
        found = _TASK.fullmatch(run.task)
        if found is None:
            raise PromptError(f"run {run.task!r} is none of the order desk: its task id is A01, or A01/7 with seed 7")
        set_name, number, seed = found["set"], int(found["number"]), int(found["seed"] or 0)
        if (set_name, seed) not in self._desks:
            self._desks[set_name, seed] = make_database(seed, SPLITS[set_name]), []
        desk, known = self._desks[set_name, seed]
        if len(known) < number:
            known[:] = islice(generate_requests(set_name, seed, desk), number)
        request = known[number - 1]
        if request.opening != next((each["content"] for each in run.messages if each["role"] == "user"), None):
            raise PromptError(
                f"run {run.task!r} does not begin as the order desk's request of that name: write it again"
            )
        return desk, request


def judge() -> TrainedJudge:
    """The shipped judge, which reads the target's row and the draft's (`models/judge`)."""
    return _shipped("judge")


def divergence_judge() -> TrainedJudge:
    """The shipped judge that reads the divergence between both rows alone (`models/divergence-judge`)."""
    return _shipped("divergence-judge")


def _shipped(name: str) -> TrainedJudge:
    from precedent_research.judge import TrainedJudge

    return TrainedJudge.load(Path(__file__).parent / "models" / name)
