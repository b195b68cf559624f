"""The public interface: names with their parameters, entry points, commands with their options, metrics.

The keys of JSON are in the transcripts beside it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import runpy
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from helpers.golden import FOLDER, Golden
from pydantic import BaseModel

import precedent
from precedent.cli.app import app
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.stats import Percentiles
from precedent.drafters import DraftKind
from precedent.engine.metrics import BUCKETS, EngineMetrics, Histogram
from precedent.target.support import ModelSupport
from precedent_server import serving
from precedent_server.prometheus import metric_text, prometheus_text, usage_text

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / ".ci" / "reference.py"))
COMMANDS = typer.main.get_command(app)


def surface() -> dict[str, Any]:
    """Everything that users and authors of packages rely on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known: dict[Any, str] = {}
    return {
        "extras": dict.fromkeys(sorted(project["optional-dependencies"]), ""),
        "environment": {name: "" for name, _ in REFERENCE["ENVIRONMENT"]},
        "entry points": REFERENCE["ENTRY_POINTS"],
        "commands": {path: options(command) for path, command in commands(COMMANDS)},
        "metrics": metrics(),
        "python": {module: dict(names_of(module, known)) for module in REFERENCE["MODULES"]},
    }


# Python


def names_of(module_name: str, known: dict[Any, str]) -> Iterator[tuple[str, Any]]:
    """The public names of a module; `known` are the names of what earlier modules have."""
    module = importlib.import_module(module_name)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
    plugins = precedent.PLUGINS if module is precedent else ()
    for name in sorted({*getattr(module, "__all__", own), *plugins}):
        value = inspect.unwrap(getattr(module, name))
        if name.startswith("_"):
            continue
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, kind_of(value)
        elif value in known:
            yield name, f"is {known[value]}"
        else:
            inherited = known.copy()
            known[value] = f"{module_name}.{name}"
            yield name, constructor(value) if inspect.isclass(value) else parameters(value)
            yield from members_of(name, value, inherited) if inspect.isclass(value) else ()


def kind_of(value: object) -> str:
    """The kind of a constant or an attribute; nothing for aliases of types, which depend on Python's version."""
    if isinstance(value, property | cached_property) or inspect.ismemberdescriptor(value):
        return "attribute"
    return type(value).__name__ if type(value).__module__ == "builtins" else ""


def ours(kind: type) -> list[type]:
    """A class and those of its bases that are of this project and not of its machinery, the first that count last."""
    named = [base for base in reversed(kind.__mro__) if base.__module__.startswith("precedent")]
    return [base for base in named if not base.__module__.startswith("precedent.runtime.")]


def annotated(kinds: list[type]) -> dict[str, Any]:
    return {name: said for kind in kinds for name, said in inspect.get_annotations(kind).items()}


def constructor(kind: type) -> Any:
    """What a class is called with; the bases of an error or a protocol."""
    if issubclass(kind, Exception) or getattr(kind, "_is_protocol", False):
        return "extends " + ", ".join(base.__name__ for base in kind.__bases__)
    if not issubclass(kind, BaseModel):
        return {name: said for name, said in parameters(kind).items() if name != "->"}
    found = {name: (said, kind.model_fields.get(name)) for name, said in annotated(ours(kind)).items()}
    return {
        field.alias or name: text_of(said, "required" if field.is_required() else field.default)
        for name, (said, field) in found.items()
        if field is not None and not field.exclude
    }


def members_of(name: str, kind: type, known: Collection[type]) -> Iterator[tuple[str, Any]]:
    """Methods with their parameters, and attributes, that a class adds to `known` ones."""
    kinds = [each for each in ours(kind) if each not in known]
    found = {member: value for each in kinds for member, value in vars(each).items()} | annotated(kinds)
    given = {"model_config", *getattr(kind, "model_fields", ()), *getattr(kind, "__dataclass_fields__", ())}
    for member, value in sorted(found.items()):
        called = getattr(value, "__func__", value)
        if not member.startswith(("_", "test_")) and member not in given:
            said = value if isinstance(value, str) and member in annotated(kinds) else kind_of(value)
            yield f"{name}.{member}", parameters(called) if inspect.isfunction(called) else said


def parameters(called: Callable[..., Any]) -> dict[str, str]:
    """Type and default of every parameter; those behind `*` are given by name."""
    signature, found = inspect.signature(called), dict[str, str]()
    for name, each in signature.parameters.items():
        if each.kind is each.KEYWORD_ONLY and not any(other.startswith("*") for other in found):
            found["*"] = ""
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        if name not in ("self", "cls") and not name.startswith("_"):
            found[stars + name] = text_of(each.annotation, each.default)
    return found | {"->": text_of(signature.return_annotation)}


def text_of(annotation: Any, default: object = inspect.Parameter.empty) -> str:
    """Type and default as in the source."""
    said = getattr(annotation, "__forward_arg__", getattr(annotation, "__name__", annotation))
    return (
        str(said) if default is inspect.Parameter.empty else f"{said} = {getattr(default, '__name__', repr(default))}"
    )


# Commands


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        elif not command.hidden:
            yield f"{path}{name}", command


def options(command: Any) -> dict[str, str]:
    """Arguments and options, which of them are flags or may be repeated, and defaults."""
    shown = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    return {REFERENCE["_spelling"](each).replace("`", ""): value_of(each) for each in shown}


def value_of(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return "flag"
    default = REFERENCE["_default"](parameter).strip("`")
    return f"repeatable {default}".strip() if parameter.multiple or parameter.nargs == -1 else default


# Metrics


def metrics() -> dict[str, str]:
    """Kind and labels of everything that a server writes on `/metrics`."""
    none, histograms = Percentiles(), {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
    fields = ("request_queue_time", "time_to_first_token", "inter_token_latency", "e2e_request_latency")
    snapshot = EngineMetrics(
        num_requests_running=0, num_requests_waiting=0, kv_cache_reserved_bytes=0, kv_cache_idle_bytes=0,
        kv_cache_max_bytes=1, accepted_by_source={}, decode_seconds_saved=0.0, histograms=histograms,
        degraded=("recall",), faults={"recall": 1}, **{f"{name}_seconds": none for name in fields},
    )  # fmt: skip
    engine: Any = SimpleNamespace(model_name="desk", metrics=lambda: snapshot)
    text = prometheus_text([engine]) + usage_text([(("desk", "shop"), Counter({"2xx": 1}))])
    text += metric_text(serving.IGNORED, "counter", serving.IGNORED_HELP, 0)
    text += "".join(metric_text(name, kind, said, 0) for name, (kind, said) in serving.OF_MODELS.items())
    labels = defaultdict[str, set[str]](set)
    for name, said in re.findall(r"^(?!#)([\w:]+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        labels[name].update(re.findall(r'(\w+)="', said))
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    return {name: " ".join([kind, *sorted(labels[name])]) for name, kind in sorted(kinds)}


# The tests


def test_the_public_interface_is_as_recorded(golden: Golden) -> None:
    golden("surface", surface())


def test_the_json_of_every_command_is_recorded() -> None:
    files = (FOLDER / "transcripts").glob("commands*.json")
    recorded = [name for file in files for name in json.loads(file.read_text(encoding="utf-8"))]
    promised = [path for path, command in commands(COMMANDS) if "--json" in options(command)]
    assert [path for path in promised if not any(name.startswith(path) for name in recorded)] == []


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "precedent.commands": lambda found: isinstance(found, typer.Typer),
    "precedent.drafters": lambda found: isinstance(found, DraftKind) or callable(found),
    "precedent.loops": lambda found: issubclass(found, DecodeLoop),
    "precedent.models": lambda found: isinstance(found, ModelSupport),
}


def test_every_group_of_entry_points_is_listed_and_its_entries_are_what_is_asked_for() -> None:
    groups = {group for group in entry_points().groups if group.startswith("precedent.")}
    assert groups <= REFERENCE["ENTRY_POINTS"].keys()
    found = [(entry, KINDS.get(group, callable)) for group in groups for entry in entry_points(group=group)]
    assert [entry for entry, fits in found if not fits(entry.load())] == []
