"""Schemathesis asks every route of `/openapi.json` for what its description allows, and for what it does not.

Left out is one check, `positive_data_acceptance`: a request that the description allows may be refused with 400, for a
schema does not know what a model can do. It does not hold the ranges of sampling settings, the ids of the vocabulary,
what the chat template reads, patterns that a grammar cannot follow, and the server's own limits.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from precedent_server.description import ROUTES

pytestmark = pytest.mark.clients

COMMAND = os.environ.get("PRECEDENT_SCHEMATHESIS", str(Path(__file__).parents[4] / ".venv-clients/bin/schemathesis"))
OPERATIONS = [f"{'GET' if route.body is None else 'POST'} {path}" for path, route in ROUTES.items()]
OPERATIONS.append("DELETE /v1/responses/{id}")
LEAST_CASES = 1000
SETTINGS = (
    *("--checks", "all", "--exclude-checks", "positive_data_acceptance", "--phases", "coverage,fuzzing"),
    *("--max-examples", "200", "--seed", "1", "--request-timeout", "120", "--continue-on-failure", "--report", "junit"),
)


@cache
def ran(address: str, key: str, folder: Path) -> tuple[str, dict[str, ElementTree.Element]]:
    """What Schemathesis says, and its report by operation."""
    if not Path(COMMAND).is_file():
        pytest.fail("`make test-clients` installs schemathesis into .venv-clients")
    asked = (f"{address}/openapi.json", "-H", f"Authorization: Bearer {key}", *SETTINGS)
    report = folder / "report.xml"
    done = subprocess.run(
        [COMMAND, "run", *asked, "--report-junit-path", str(report)],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert report.is_file(), done.stdout + done.stderr
    return done.stdout, {case.attrib["name"]: case for case in ElementTree.parse(report).iter("testcase")}


@pytest.fixture
def found(server: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, ElementTree.Element]]:
    return ran(server.address, server.keys["boss"], tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation(found: Any, operation: str) -> None:
    said, report = found
    assert operation in report, said
    wrong = [part for kind in ("failure", "error", "skipped") for part in report[operation].iter(kind)]
    assert not wrong, "\n".join(f"{part.get('message')}\n{part.text}" for part in wrong)


def test_many_cases_were_asked(found: Any) -> None:
    said, report = found
    generated = re.search(r"([\d,]+) generated", said)
    assert generated is not None, said
    assert int(generated[1].replace(",", "")) >= LEAST_CASES
    assert set(report) == set(OPERATIONS)
