"""Every benchmark takes `--json FILE`; none runs here: `main` stops when it has its options."""

from __future__ import annotations

import importlib.util
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, NoReturn

import pytest

FOLDER = Path(__file__).parent / "benchmarks"
PROGRAMS = sorted(FOLDER.glob("bench_*.py"))


class Asked(Exception):
    """Where a benchmark would begin to measure; its argument is the parser."""


def stopping(parser: ArgumentParser, *_: Any) -> NoReturn:
    raise Asked(parser)


def options_of(program: Path, monkeypatch: pytest.MonkeyPatch) -> ArgumentParser:
    """The parser with which a program's `main` reads its command line."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, program.stem, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(ArgumentParser, "parse_args", stopping)
    with pytest.raises(Asked) as asked:
        module.main()
    return asked.value.args[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_benchmark_takes_a_file_for_its_figures(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = options_of(program, monkeypatch)
    (option,) = [action for action in parser._actions if "--json" in action.option_strings]
    assert option.type is Path
    assert option.metavar == "FILE"
