"""`precedent cache` as a shell runs it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from helpers.command_line import precedent


@dataclass
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: object, columns: int = 200) -> Result:
    """Run `precedent cache` as the command line does, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("TERM", "dumb")
        status = precedent("cache", *arguments)
    return Result(status, out.getvalue(), err.getvalue())


def run_json(tmp_path, *arguments: object) -> dict:
    result = run(*arguments, "--json", tmp_path / "result.json")
    assert result.exit_code == 0, result.stderr
    return json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
