"""The packages of Anthropic, Ollama and OpenAI, and the AI SDK: each of their tests in Node is a test here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent


def names_in(file: str) -> list[str]:
    """The names of the tests in a file."""
    return re.findall(r'^test\("(.+?)"', (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)


@cache
def failures_of(file: str, server: Any) -> dict[str, str | None]:
    """Runs a file's tests in Node; what failed in each by name, None for nothing."""
    node = shutil.which("node")
    if node is None or not (HERE / "node_modules").is_dir():
        pytest.fail("Node 20 or newer and `npm ci` beside these tests are needed: `make test-clients` does the latter")
    told = {"ADDRESS": server.address, "KEY": server.keys["desk"], "ADMIN_KEY": server.keys["boss"]}
    environment = {**os.environ, **{f"PRECEDENT_{name}": value for name, value in told.items()}}
    done = subprocess.run(
        [node, "--test", "--test-reporter=junit", file],
        cwd=HERE, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    cases = ElementTree.fromstring(done.stdout).iter("testcase")
    return {case.attrib["name"]: failure_in(case) for case in cases}


def failure_in(case: ElementTree.Element) -> str | None:
    failure = case.find("failure")
    return None if failure is None else f"{failure.get('message')}\n{failure.text}"


FILES = ("ai_sdk.test.mjs", "anthropic_node.test.mjs", "ollama_node.test.mjs", "openai_node.test.mjs")
CASES = [(file, name) for file in FILES for name in names_in(file)]


@pytest.mark.parametrize(("file", "name"), CASES)
def test_of_node(server: Any, file: str, name: str) -> None:
    found = failures_of(file, server)
    assert name in found, f"{file} has not run {name!r}: {found}"
    assert found[name] is None, found[name]
