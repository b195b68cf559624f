"""What importing and constructing `ChatPrecedentServer` loads, and what is said where its extra is missing."""

from __future__ import annotations

import os
import subprocess
import sys


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


def test_without_the_extra_the_error_names_it_and_the_rest_works() -> None:
    script = """
for home in ("precedent", "precedent_server.client"):
    try:
        __import__(home, fromlist=["ChatPrecedentServer"]).ChatPrecedentServer
    except Exception as error:
        print(type(error).__name__, error)
import precedent
print(precedent.SamplingParams.__name__)
"""
    assert in_a_new_process(script, without="openai").splitlines() == [
        *["ConfigError ChatPrecedentServer needs langchain-openai: pip install 'precedent-llm[client]'"] * 2,
        "SamplingParams",
    ]
