"""Examples in docstrings are run, and every public class and function of `precedent` has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import precedent

MODULES = (
    "precedent.cache.speculation_cache",
    "precedent.cache.store.redaction",
    "precedent.cache.store.store_url",
    "precedent.config",
    "precedent.custom_generate.hook",
    "precedent.engine.engine",
    "precedent.grammar.spec",
    "precedent.langchain.chat_model",
    "precedent.langchain.recorder",
    "precedent.text.templates",
    "precedent.verify",
)
"""Where the examples are."""


def public() -> list[Any]:
    """Classes and functions; errors need no example."""
    found = [getattr(precedent, name) for name in precedent.__all__ if name != "__version__"]
    return [each for each in found if not (inspect.isclass(each) and issubclass(each, Exception))]


@pytest.mark.parametrize("thing", public(), ids=lambda thing: thing.__name__)
def test_every_public_name_has_an_example_that_is_run(thing: Any) -> None:
    assert ">>> " in (thing.__doc__ or "")
    assert thing.__module__ in MODULES


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert done.attempted > 0
    assert done.failed == 0
