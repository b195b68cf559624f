"""Pytest plugin that runs a session on a mutant: `-p mutant_plugin` with PRECEDENT_MUTANT set to its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import mutants
import pytest

VARIABLE = "PRECEDENT_MUTANT"
BROKEN = 70
"""Exit status of a session in which the mutant itself raised."""

OWN_FILES = frozenset(Path(__file__).parent.glob("mutant*.py"))

_for_good, _broken = ExitStack(), list[str]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """The mutant is there before any test file is imported, and stays until the process ends."""
    name = os.environ.get(VARIABLE)
    if name:
        _for_good.enter_context(mutants.MUTANTS[name].applied())
    return (yield)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Note an error that comes from the mutants' own code: such a mutant would be caught for the wrong reason."""
    error = call.excinfo.value if call.excinfo else None
    while error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and Path(trace.tb_frame.f_code.co_filename) in OWN_FILES:
            _broken.append(f"{item.nodeid}: {type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the runner of such an error."""
    if _broken:
        print(f"\nthe mutant itself raised in {_broken[0]}")
        session.exitstatus = BROKEN
