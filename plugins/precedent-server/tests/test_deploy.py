"""What operators are given: Grafana's dashboard agrees with `/metrics`, and systemd's unit with `precedent serve`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from precedent_server.keys import KeyFile, add_key
from precedent_server.serve import commands
from precedent_server.settings import ServerLimits

DEPLOY = Path(__file__).parents[1] / "deploy"
METRIC = re.compile(r"\b([a-z]+:[a-z0-9_]+)\b(?:\{([^}]*)\})?")


def expressions() -> list[str]:
    """Every query of the dashboard, those of its variables as PromQL."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"]).groups()
            found.append(f"sum by ({label}) ({name})")
    assert len(found) > 20
    return found


def unknown(expression: str, labels: dict[str, set[str]]) -> set[str]:
    """Names of metrics that are none, and labels that one of the expression's metrics lacks."""
    wrong, metrics = set[str](), METRIC.findall(expression)
    for name, selectors in metrics:
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', "", selectors)))
        for group in re.findall(r"\bby \(([^)]*)\)", expression):
            asked |= set(re.split(r",\s*", group))
        wrong |= {name} if name not in labels else {f"{name}: {label}" for label in asked - labels[name]}
    return wrong if metrics else {f"no metric in {expression}"}


async def test_every_metric_and_label_of_the_dashboard_is_one_of_the_server(serve: Any, path: Path) -> None:
    """Also those that only keys and faults bring about."""
    key = {"Authorization": f"Bearer {add_key(path, 'boss', 'shop', 'admin')}"}
    client = serve(lambda prompt: "x", keys=KeyFile(path), on_result=lambda prompt_ids, result: 1 / 0)
    asked = {"model": "scripted", "prompt": "hello", "max_tokens": 2}
    assert (await client.post("/v1/completions", json=asked, headers=key)).status_code == 200
    text = (await client.get("/metrics", headers=key)).text
    labels = {
        name: set(re.findall(r'(\w+)="', rest)) for name, rest in re.findall(r"^([a-z0-9_:]+)\{(.*)\} \S+$", text, re.M)
    }
    assert {one: wrong for one in expressions() if (wrong := unknown(one, labels))} == {}
    wrong = 'sum by (key, model) (rate(precedent:key_requests_total{state=~"x=y"}[5m])) / vllm:none'
    lacking = {"precedent:key_requests_total: model", "precedent:key_requests_total: state"}
    assert unknown(wrong, labels) == {*lacking, "vllm:none"}


def unit() -> dict[str, list[str]]:
    """The settings of the unit, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "precedent.service").read_text(encoding="utf-8").splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_starts_the_server_with_options_that_there_are() -> None:
    settings = unit()
    (command,), (grace,) = settings["ExecStart"], settings["TimeoutStopSec"]
    program, name, *arguments = command.split()
    known = {one for parameter in typer.main.get_command(commands).params for one in parameter.opts}
    assert (Path(program).name, name) == ("precedent", "serve")
    assert {one for one in arguments if one.startswith("--")} <= known
    assert int(grace) > ServerLimits().grace_seconds
    assert settings["DynamicUser"] == ["yes"]
    assert settings["ProtectSystem"] == ["strict"]
    assert "-HUP" in settings["ExecReload"][0]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """With a program that this machine has."""
    text = (DEPLOY / "precedent.service").read_text(encoding="utf-8")
    copy = tmp_path / "precedent.service"
    copy.write_text(
        text.replace("/opt/precedent/bin/precedent serve", f"{sys.executable} -m precedent serve"), encoding="utf-8"
    )
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
