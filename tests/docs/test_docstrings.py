"""Examples in docstrings are run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

MODULES = (
    "precedent.cache.speculation_cache",
    "precedent.cache.redaction",
    "precedent.cache.store_url",
    "precedent.config",
    "precedent_generate.hook",
    "precedent.engine.engine",
    "precedent.grammar.spec",
    "precedent.langchain.chat_model",
    "precedent_replay.recorder",
    "precedent.text.templates",
    "precedent.verify",
)
"""Where the examples are."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert done.attempted > 0
    assert done.failed == 0
