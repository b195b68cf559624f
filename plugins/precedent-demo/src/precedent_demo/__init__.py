"""The order desk: repeated customer workflows on a real database, served by a LangChain agent.

desk = make_database(seed=0)
for request in make_requests("B", full=False, seed=0):
    transcript = run_request(chat_model, request, desk)
"""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

from precedent.errors import ConfigError
from precedent_demo import database
from precedent_demo.conversation import (
    MAX_TOKENS_PER_TURN,
    SYSTEM_PROMPT,
    CustomerInTheLoop,
    Transcript,
    run_request,
)
from precedent_demo.desk import OrderDesk, PolicyError
from precedent_demo.requests import Call, Goal, Request
from precedent_demo.tools import READ_ONLY, make_tools
from precedent_demo.workflows import SIZES, generate_requests

__all__ = [
    "MAX_TOKENS_PER_TURN",
    "READ_ONLY",
    "SYSTEM_PROMPT",
    "Call",
    "CustomerInTheLoop",
    "Goal",
    "OrderDesk",
    "PolicyError",
    "Request",
    "Transcript",
    "adapted_target",
    "block_folder",
    "draft_folder",
    "make_database",
    "make_requests",
    "make_tools",
    "run_request",
]


def make_database(seed: int, split: str = "held-out") -> OrderDesk:
    """An order desk in memory with about 400 orders of 200 customers; seed and split determine every row.

    The adapter is trained on the split "train". Raises ConfigError for an unknown split.
    """
    return OrderDesk(database.build(seed, split))


def make_requests(set_name: str, full: bool = False, seed: int = 0) -> list[Request]:
    """The requests of set "A" (30, or 60 with `full`) or "B" (15, or 40) for the database of the same seed.

    Raises ConfigError for an unknown set name.
    """
    if set_name not in SIZES:
        raise ConfigError(f"there is no request set {set_name!r}; choose A or B")
    with closing(make_database(seed)) as desk:
        return list(islice(generate_requests(set_name, seed, desk), SIZES[set_name][full]))


def adapted_target(adapter: Path | None = None) -> Path:
    """Folder of the packaged target with an adapter (by default the package's own) merged in; merged only once.

    Raises ModelLoadError if the target, the adapter or the disk space is missing.
    """
    from precedent_demo import adapted  # loads torch

    return adapted.adapted_target(adapter)


def draft_folder() -> Path:
    """Folder of the order desk's draft model, distilled from `adapted_target()`: a chain of two layers."""
    return Path(__file__).parent / "models" / "draft"


def block_folder() -> Path:
    """Folder of the order desk's block draft, which fills eight positions from what `adapted_target()` computes."""
    return Path(__file__).parent / "models" / "block"
