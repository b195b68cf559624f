"""Fixtures for testing agents without weights; pytest finds them once the package is installed.

Nothing heavy is imported before a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from precedent.engine.engine import Engine
    from precedent_testing.lossless import Runs
    from precedent_testing.scripted_engine import Script


EngineMaker = Callable[..., "Engine"]
"""The fixture `precedent_engine`: an engine for a script, and settings of `scripted_model_engine`."""

LosslessAssertion = Callable[..., "Runs"]
"""The fixture `assert_lossless`: see `precedent_testing.lossless.assert_lossless`."""


@pytest.fixture
def precedent_engine() -> Iterator[EngineMaker]:
    """Makes engines on a tiny real model that follows a script; they are closed after the test.

    def test_my_agent(precedent_engine):
        engine = precedent_engine([("user", "Where is order 1042?"), ("assistant", "It was sent.")])
        llm = ChatPrecedent.from_engine(engine)
    """
    from precedent_testing.scripted_model import scripted_model_engine

    engines: list[Engine] = []

    def make(script: Script, **settings: Any) -> Engine:
        engines.append(scripted_model_engine(script, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def assert_lossless() -> LosslessAssertion:
    """Asserts that a chat model, or one with tools bound, answers the same with and without speculation."""
    from precedent_testing.lossless import assert_lossless as check

    return check
