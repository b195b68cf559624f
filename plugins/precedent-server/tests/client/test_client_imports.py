"""What importing and constructing `ChatPrecedentServer` loads, and what is said where its extra is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def in_a_new_process(script: str, *, without: str = "") -> str:
    """What a script prints in a process of its own, in which the package `without` cannot be imported."""
    block = f"import sys\nsys.modules[{without!r}] = None\n" if without else ""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", block + script], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def test_construction_loads_no_weights_and_no_engine() -> None:
    script = """
from precedent import ChatPrecedentServer
llm = ChatPrecedentServer(model="m", base_url="http://server", templates=["It {is}."], reasoning=True)
llm.with_structured_output({"title": "a", "type": "object", "properties": {}})
llm._get_request_payload([("user", "hi")], response_format={"type": "json_object"}, prediction="x", drafters=["prompt"])
import sys
print(*sys.modules)
"""
    loaded = set(in_a_new_process(script).split())
    assert "langchain_openai" in loaded
    assert not loaded & {"torch", "transformers", "numba", "faiss", "numpy", "sentence_transformers", "llguidance"}
    rooms = {name.split(".")[1] for name in loaded if name.startswith("precedent.")}
    assert rooms == {"config", "errors", "langchain", "runtime", "text"}


@pytest.mark.parametrize("home", ["precedent", "precedent_server.client"])
def test_it_is_at_home_in_two_places(home: str) -> None:
    script = f"from {home} import ChatPrecedentServer; print(ChatPrecedentServer.__module__)"
    assert in_a_new_process(script).strip() == "precedent_server.client.chat_model"


@pytest.mark.parametrize("home", ["precedent", "precedent_server.client"])
@pytest.mark.parametrize("missing", ["langchain_openai", "openai"])
def test_without_the_extra_the_error_names_it(home: str, missing: str) -> None:
    script = f"""
try:
    from {home} import ChatPrecedentServer
except Exception as error:
    print(type(error).__name__, error)
"""
    told = in_a_new_process(script, without=missing)
    assert told.strip() == "ConfigError ChatPrecedentServer needs langchain-openai: pip install 'precedent-llm[client]'"


def test_the_rest_of_the_library_does_without_the_extra() -> None:
    script = "import precedent; print('ChatPrecedentServer' in precedent.__all__, precedent.SamplingParams.__name__)"
    assert in_a_new_process(script, without="langchain_openai").split() == ["False", "SamplingParams"]


def test_the_extra_is_declared() -> None:
    import tomllib

    plugin, core = (
        tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        for folder in (Path(__file__).parents[2], Path(__file__).parents[4])
    )
    (needed,) = plugin["project"]["optional-dependencies"]["client"]
    assert core["project"]["optional-dependencies"]["client"] == ["precedent-server[client]"]
    assert needed in core["dependency-groups"]["test"]
