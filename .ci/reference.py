"""Writes the pages of docs/reference that are generated from the code.

`make docs` runs it before it builds the site. The pages are not kept in git.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[1] / "docs" / "reference"

MODULES = (
    "precedent",
    "precedent.langchain",
    "precedent_server.client",
    "precedent_run_ahead",
    "precedent.engine",
    "precedent.cache",
    "precedent.drafters",
    "precedent.planning",
    "precedent.grammar",
    "precedent_engines",
    "precedent.target.contract",
    "precedent.target.support",
    "precedent.tree",
    "precedent.verify",
    "precedent_testing.drafter_contract",
    "precedent_testing.embedders",
    "precedent_testing.lossless",
    "precedent_testing.scripted_model",
    "precedent_testing.store_contract",
    "precedent_testing.target_contract",
    "precedent.text.tool_formats",
)
"""The import paths that users and authors of packages may rely on (tests/golden/surface.json)."""

ENTRY_POINTS = {
    "precedent.commands": "a `typer.Typer`; its commands join those of `precedent`",
    "precedent.drafters": "a factory `(parts: DrafterParts) -> Drafter | None`, or a `DraftKind`",
    "precedent.judges": "a factory without arguments that returns a `precedent_research.judge.Judge`",
    "precedent.loops": "a subclass of `precedent.decoding.loop.DecodeLoop`",
    "precedent.models": "an instance of a subclass of `precedent.target.support.ModelSupport`",
    "precedent.modes": "a function of the mode's parameters that returns its `precedent.verify.Verifier`",
    "precedent.outcomes": "a factory without arguments that returns a `precedent_research.reruns.Outcome`",
    "precedent.stores": "a function of a `StoreURL` and the settings of `SpeculationCache.open` that returns a "
    "`CompletionStore`; the entry's name is the URL's scheme",
    "precedent.tool_formats": "a `precedent.text.tool_formats.ToolFormat`",
}
"""What an entry of each group must name."""

ENVIRONMENT = (
    ("PRECEDENT_MODEL", "`model` of a chat model that is given none"),
    ("PRECEDENT_DRAFT_MODEL", "`draft_model`, in the same way"),
    ("PRECEDENT_SPECULATION_CACHE", "`speculation_cache`, in the same way"),
    ("PRECEDENT_SPECULATION", "`off`: plain decoding that stores nothing, in a running process too"),
    ("PRECEDENT_API_KEY", "the key of a `ChatPrecedentServer`"),
    ("PRECEDENT_SERVE_…", "an option of `precedent serve`: `--max-queued` is `PRECEDENT_SERVE_MAX_QUEUED`"),
    ("PRECEDENT_CPU_KERNELS", "`avx2`, `avxvnni` or `avx512`: kernels of a lesser processor, for comparisons"),
    ("OMP_NUM_THREADS", "the most threads of a forward pass on a CPU"),
    ("HF_HUB_OFFLINE", "`1`: ask no hub for models"),
    ("PGPASSWORD, PGPASSFILE", "the password of a `postgresql://` cache"),
)


ALSO = """`ChatPrecedent` and `PrecedentLLM` also take the fields of [`EngineOptions`](#engineoptions), which cannot be
given per call, and of [`SamplingParams`](#samplingparams). `limits` needs
[`from_engine`](../how-to/langchain.md#start-from-what-you-have).
"""


def bullets(docstring: str | None) -> dict[str, str]:
    """Meaning by name, of the lines "- `name`: meaning" of a docstring."""
    found = re.findall(r"^- `(\w+)`: (.+(?:\n  .+)*)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines) + "\n"


def summary(thing: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def default_of(value: Any) -> str:
    """A default as a reader sees it."""
    if value is inspect.Parameter.empty or value is dataclasses.MISSING:
        return "required"
    return f"`{value.__name__ if inspect.isroutine(value) else repr(value)}`"


def settings() -> str:
    """Every setting of the library, its default and what it means."""
    from precedent import ChatPrecedent, EngineLimits, SamplingParams, SpeculationCache, SpeculationConfig
    from precedent.engine import EngineOptions
    from precedent.langchain import SpeculationMiddleware

    parts = ["# Settings\n\nLook up a setting, its default and what it means.\n"]
    own = bullets(ChatPrecedent.__doc__)
    elsewhere = bullets(EngineOptions.__doc__).keys() | bullets(SamplingParams.__doc__).keys()
    fields = {name: value for name, value in _chat_fields(ChatPrecedent).items() if name not in elsewhere - own.keys()}
    parts += [_section("ChatPrecedent", ChatPrecedent, fields), ALSO]
    for kind in (SamplingParams, SpeculationConfig, EngineOptions, EngineLimits):
        parts.append(_section(kind.__name__, kind, _fields(kind)))
    opened = inspect.signature(SpeculationCache.open).parameters
    given = {name: default_of(found.default) for name, found in opened.items()}
    parts.append(_section("SpeculationCache.open", SpeculationCache.open, given))
    taken = list(inspect.signature(SpeculationMiddleware.__init__).parameters.items())[1:]
    given = {name: default_of(found.default) for name, found in taken}
    parts.append(_section("SpeculationMiddleware", SpeculationMiddleware, given))
    parts.append("## Environment\n\n" + table(("variable", "meaning"), [(f"`{a}`", b) for a, b in ENVIRONMENT]))
    return "\n".join(parts)


def _fields(kind: type) -> dict[str, str]:
    return {
        field.name: "`{}`" if field.default is dataclasses.MISSING else default_of(field.default)
        for field in dataclasses.fields(kind)
    }


def _chat_fields(model: Any) -> dict[str, str]:
    """The fields that LangChain's own chat model lacks."""
    from langchain_core.language_models.chat_models import BaseChatModel

    hidden = {*BaseChatModel.model_fields, "engines", "streaming"}
    return {
        name: "required" if field.is_required() else default_of(field.default)
        for name, field in model.model_fields.items()
        if name not in hidden
    }


def _section(title: str, kind: Any, defaults: dict[str, str]) -> str:
    """A heading, the summary, and a row for each setting. Raises KeyError for a setting that nothing explains."""
    meanings = bullets(kind.__doc__)
    rows = [(f"`{name}`", default, meanings[name]) for name, default in defaults.items()]
    return f"## {title}\n\n{summary(kind)}\n\n{table(('setting', 'default', 'meaning'), rows)}"


def command_line() -> str:
    """Every command, argument and option, from the commands themselves."""
    import typer

    from precedent.cli.app import app

    parts = ["# Command line\n\nLook up a command, its arguments and its options. `COMMAND --help` prints the same.\n"]
    return "\n".join([*parts, *_commands(typer.main.get_command(app), "precedent")])


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield _command(command, f"{path} {name}")


def _command(command: Any, path: str) -> str:
    shown = [found for found in command.params if not getattr(found, "hidden", False) and found.name != "help"]
    rows = [(_spelling(found), _default(found), found.help or "") for found in shown]
    example = " ".join((command.epilog or "").removeprefix("Example:").split())
    said = inspect.cleandoc(command.help or "").replace("\b\n", "")
    return f"## {path}\n\n{said}\n\n```console\n{example}\n```\n\n{table(('argument', 'default', 'meaning'), rows)}"


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    return "" if callable(value) or value in (None, "", False, ()) else f"`{value}`"


def metrics() -> str:
    """Every metric, under the names by which Prometheus and Python know it."""
    from precedent.engine.metrics import EngineMetrics
    from precedent_server import prometheus
    from precedent_server.serving import IGNORED, IGNORED_HELP, OF_MODELS
    from precedent_server.usage import MOST_KEYS, OTHER

    rows = [(f"`{name}`", "gauge", said) for name, (_, said) in prometheus.GAUGES.items()]
    rows.append(("`vllm:kv_cache_usage_perc`", "gauge", "Share of the memory of keys and values, 0 to 1."))
    rows += [(f"`{name}_total`", "counter", said) for name, (_, said) in prometheus.COUNTERS.items()]
    rows.append((f"`{IGNORED}`", "counter", f"{IGNORED_HELP} A server alone writes it, without labels."))
    rows += [(f"`{name}`", kind, f"{said} Without labels.") for name, (kind, said) in OF_MODELS.items()]
    rows += [(f"`{name}`", "histogram", said) for name, (_, said) in prometheus.HISTOGRAMS.items()]
    rows += [(f"`{name}`", kind, said) for name, (kind, said) in prometheus.OF_AIDS.items()]
    of_keys = {name: said for name, (_, said) in prometheus.OF_KEYS.items()}
    of_keys = {prometheus.REQUESTS_OF_KEY: prometheus.REQUESTS_OF_KEY_HELP, **of_keys}
    rows += [(f"`{name}`", "counter", f"{said} Labels: `key`, `tenant`.") for name, said in of_keys.items()]
    names = [(f"`{field.name}`",) for field in dataclasses.fields(EngineMetrics)]
    return "\n".join([
        "# Metrics\n\nLook up a metric of `GET /metrics` or of `Engine.metrics()`.\n",
        "## `/metrics`\n\n`prometheus_text` of `precedent_server.prometheus` writes the same. Each series has the "
        "labels `model_name`, under which a server has the model, and `engine`. Names and buckets are vLLM's. Series "
        f"of keys name {MOST_KEYS} keys and add up the others as `{OTHER}`. A key sees its own series, an "
        "administrator's key all.\n",
        table(("name", "kind", "meaning"), rows),
        f"## `Engine.metrics()`\n\n{_paragraphs(EngineMetrics)}\n\n{table(('field',), names)}",
    ])  # fmt: skip


def errors() -> str:
    """Every error, with its bases and when it is raised."""
    from precedent import errors as module

    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__]
    bases = {kind: ", ".join(f"`{base.__name__}`" for base in kind.__bases__) for kind in kinds}
    rows = [(f"`{kind.__name__}`", bases[kind], summary(kind)) for kind in kinds]
    return (
        "# Errors\n\nLook up an error. All are in `precedent` and `precedent.errors`. Each message is one line that "
        "says what was wrong and what to do.\n\n" + table(("error", "is a", "when"), rows) + "\n"
        "Errors of a call of a chat model are LangChain's own types as well: `ContextOverflowError`, "
        "`ModelInvalidRequestError` (a `ConfigError`, `PromptError` or `UnsupportedError`), `ModelNotFoundError` (a "
        "`ModelLoadError`) and `OutputParserException`.\n"
    )


def plugins() -> str:
    """Every group of entry points."""
    rows = [(f"`{group}`", said) for group, said in ENTRY_POINTS.items()]
    return (
        "# Entry points\n\nLook up what a package of yours may add. `pyproject.toml` lists its entries, for instance "
        'under `[project.entry-points."precedent.drafters"]`; the entry\'s name is how users ask for it.\n\n'
        + table(("group", "an entry names"), rows)
    )


def python() -> dict[str, str]:
    """A page for each public module: every name, how it is called, and its docstring."""
    seen: set[int] = set()
    heads = {name: f"# `{name}`\n\n{_module(name)}\n" for name in MODULES}
    pages = {f"python/{name}.md": "\n".join([head, *_names(name, seen)]) for name, head in heads.items()}
    rows = "\n".join(f"- [`{name}`]({name}.md): {_module(name)}" for name in MODULES)
    said = "Look up a class or function. Everything listed here is public; anything else may change."
    return {"python/index.md": f"# Python names\n\n{said}\n\n{rows}\n", **pages}


def _module(name: str) -> str:
    return summary(importlib.import_module(name)) or "Names for your programs."


def _names(module_name: str, seen: set[int]) -> Iterator[str]:
    module = importlib.import_module(module_name)
    own = [name for name, found in vars(module).items() if getattr(found, "__module__", "") == module_name]
    for name in sorted(getattr(module, "__all__", own)):
        found = getattr(module, name)
        callable_here = inspect.isclass(found) or inspect.isfunction(found)
        if name.startswith("_") or not callable_here or id(found) in seen or issubclass_of_error(found):
            continue
        seen.add(id(found))
        yield f"## `{name}`\n\n{_paragraphs(found)}\n" + _methods(found)


def issubclass_of_error(found: Any) -> bool:
    """Errors have a page of their own."""
    return inspect.isclass(found) and issubclass(found, Exception)


def _paragraphs(found: Any) -> str:
    """A docstring as Markdown: examples become code."""
    text = inspect.getdoc(found) or ""
    text = re.sub(r"(?ms)^>>> .*?(?=\n\n|\Z)", lambda match: f"```pycon\n{match[0].rstrip()}\n```", text)
    indented = re.compile(r"((?:^    .*\n?)+)", re.MULTILINE)
    return indented.sub(lambda match: f"```python\n{inspect.cleandoc(match[0])}\n```\n", text).strip()


def _methods(kind: Any) -> str:
    if not inspect.isclass(kind):
        return ""
    bases = [base for base in reversed(kind.__mro__) if base.__module__.startswith("precedent.")]
    ours = [vars(base) for base in bases if not base.__module__.startswith("precedent.runtime.")]
    called = {name: found for names in ours for name, found in names.items() if not name.startswith(("_", "test_"))}
    kinds = (property, classmethod, staticmethod)
    rows = [
        (f"`{name}`", summary(found))
        for name, found in called.items()
        if (inspect.isroutine(found) or isinstance(found, kinds)) and summary(found)
    ]
    return "\n" + table(("method", "what it does"), rows) if rows else ""


def pages() -> dict[str, str]:
    """Text by name of page."""
    return {
        "settings.md": settings(),
        "command-line.md": command_line(),
        "metrics.md": metrics(),
        "errors.md": errors(),
        "entry-points.md": plugins(),
        **python(),
    }


def main() -> None:
    """Write the pages."""
    for page, text in pages().items():
        (PAGES / page).parent.mkdir(exist_ok=True)
        (PAGES / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
