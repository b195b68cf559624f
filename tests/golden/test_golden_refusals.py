"""Combinations of models, options and requests: each works, or is refused with the recorded error and message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.golden import Golden
from transformers import PreTrainedModel

from precedent import (
    ChatPrecedent,
    Engine,
    EngineLimits,
    PrecedentError,
    SamplingParams,
    SpeculationCache,
    SpeculationConfig,
    Template,
    Templates,
)
from precedent.grammar import JsonSchema, Lark, Regex
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent_testing.scripted_model import fixed_cost, scripted_tokenizer
from precedent_testing.sweep import tiny_model
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm, tiny_seq2seq_lm

WINDOW = {"sliding_window": 16}

TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_causal_lm,
    "sliding-window": lambda: tiny_causal_lm("mistral", **WINDOW),
    "attention-sinks": lambda: tiny_causal_lm("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=12),
    "hybrid": lambda: tiny_model("lfm2"),
    "single-path": lambda: tiny_causal_lm("bloom"),
    "encoder-decoder": lambda: tiny_seq2seq_lm("bart"),
}

ALIKE = ("sliding-window", "attention-sinks")
"""Refused as Llama is, apart from what their attention cannot do."""

PROMPT = list(b"look up order 17")

TAILS = re.compile(r"(tokenizer of \S+: |load the model \S+: |enforce this grammar: ).*")
IN_PARENTHESES = re.compile(r"(used here|cannot be read) \([^)]*\)")
LISTS = re.compile(r"(installed|known): [^;)]*")
"""Words of other libraries, which change with their versions, and lists that are longer where more is installed."""


def outcome(act: Callable[[], Any], tmp_path: Path) -> str:
    """The word that `act` returns ("works" for none), or the error that it raises."""
    try:
        said = act()
    except (PrecedentError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {normalised(str(error), tmp_path)}"
    return said if isinstance(said, str) else "works"


def normalised(text: str, tmp_path: Path) -> str:
    """The text on one line, without this machine's folders and without what depends on other packages."""
    text = " ".join(text.replace(str(tmp_path), "FOLDER").split())
    return LISTS.sub(r"\1: …", IN_PARENTHESES.sub(r"\1 (…)", TAILS.sub(r"\1…", text)))


def outcomes(acts: Mapping[str, Callable[[], Any]], tmp_path: Path) -> dict[str, str]:
    return {name: outcome(act, tmp_path) for name, act in acts.items()}


# Engine.load


def options_of_engines(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Options that some targets cannot have, or that cannot stand beside each other."""
    cache = tmp_path / "cache"
    embedder = HashEmbedder()
    mtp, judge = SpeculationConfig(drafters=("mtp",)), SpeculationConfig(mode="lossy_judge:name=nobody")
    return {
        "draft_model first-layers:1": {"draft_model": "first-layers:1"},
        "draft_model first-layers:9": {"draft_model": "first-layers:9"},
        "draft_model first-layers:x": {"draft_model": "first-layers:x"},
        "draft_model of another vocabulary": {"draft_model": tiny_causal_lm(vocab_size=300)},
        "draft_model encoder-decoder": {"draft_model": tiny_seq2seq_lm()},
        "draft_model hybrid": {"draft_model": tiny_model("lfm2")},
        "draft_model single-path": {"draft_model": tiny_causal_lm("bloom")},
        "draft_model missing": {"draft_model": tmp_path / "nowhere"},
        "draft_device": {"draft_device": "cpu"},
        "draft_device unknown": {"draft_model": "first-layers:1", "draft_device": "nowhere"},
        "pearl": {"loop": "pearl"},
        "pearl, first layers": {"loop": "pearl", "draft_model": "first-layers:1"},
        "pearl, draft model": {"loop": "pearl", "draft_model": tiny_causal_lm(num_hidden_layers=1)},
        "bitwise": {"bitwise": True},
        "cuda_graphs": {"cuda_graphs": True},
        "keep_prefixes": {"keep_prefixes": True},
        "keep_prefixes, cache": {"keep_prefixes": True, "cache": cache, "embedder": embedder},
        "cache number": {"cache": 3},
        "cache unknown scheme": {"cache": "ftp://nowhere/cache"},
        "mtp": {"speculation": mtp},
        "unknown drafter": {"speculation": SpeculationConfig(drafters=("nobody",))},
        "unknown judge": {"speculation": judge},
        "device": {"device": "cpu"},
        "dtype": {"dtype": "float32"},
        "unknown option": {"bitwse": True},
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in ALIKE else ()) for name in TARGETS],
)
@pytest.mark.sampled(2)
def test_engines_are_refused_as_recorded(name: str, golden: Golden, tmp_path: Path) -> None:
    def load(options: dict[str, Any]) -> None:
        Engine.load(TARGETS[name](), tokenizer=byte_tokenizer(), **options).close()

    acts = {option: lambda given=given: load(given) for option, given in options_of_engines(tmp_path).items()}
    golden(f"refusals/engine-{name}", outcomes(acts, tmp_path))


def saved(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    tiny_causal_lm(dtype=dtype, **settings).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with models, sound and damaged."""
    root = tmp_path_factory.mktemp("models")
    saved(root / "sound")
    saved(root / "another", vocab_size=300)
    (root / "empty").mkdir()
    for name, text in {"damaged": "{", "unknown": '{"model_type": "nobody"}', "bert": '{"model_type": "bert"}'}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(text)
    saved(root / "without-tokenizer")
    for file in (root / "without-tokenizer").glob("token*"):
        file.unlink()
    saved(root / "cut")
    weights = root / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return root


MODELS = ("empty", "damaged", "unknown", "bert", "without-tokenizer", "cut", "nowhere")

OPTIONS_BY_NAME: dict[str, dict[str, Any]] = {
    "device": {"device": "nowhere"},
    "dtype": {"dtype": "float8"},
    "chat_template": {"chat_template": "{% if"},
    "chat_template family": {"chat_template": "gemma"},
    "model_kwargs": {"model_kwargs": {"tp_size": 2}},
    "model_kwargs unknown": {"model_kwargs": {"nothing": 2}},
    "draft_model of another vocabulary": {"draft_model": "another"},
    "bitwise in float64": {"bitwise": True, "dtype": "float64"},
    "cuda_graphs": {"cuda_graphs": True, "device": "cpu"},
    "keep_prefixes": {"keep_prefixes": True},
}


def test_models_and_options_of_loading_are_refused_as_recorded(golden: Golden, folders: Path) -> None:
    def by_engine(name: str, options: dict[str, Any]) -> None:
        Engine.load(folders / name, **options).close()

    def by_chat_model(name: str, options: dict[str, Any]) -> None:
        ChatPrecedent(model=str(folders / name), **options).engine.close()

    found: dict[str, dict[str, str]] = {}
    for way in (by_engine, by_chat_model):
        acts = {name: lambda name=name, way=way: way(name, {}) for name in MODELS}
        for option, given in OPTIONS_BY_NAME.items():
            named = {key: folders / value if key == "draft_model" else value for key, value in given.items()}
            acts[f"sound, {option}"] = lambda named=named, way=way: way("sound", named)
        found[way.__name__] = outcomes(acts, folders)
    golden("refusals/loading", found)


# Requests

MODES = (
    *("auto", "greedy", "coupled", "traversal", "topdown", "nothing"),
    *("lossy_mentored", "lossy_mentored:kl=0.05", "lossy_mentored:kl=-1", "lossy_mentored:beta=1"),
    *("lossy_typical", "lossy_top_beta:beta=3,tau=1", "lossy_judge", "lossy_judge:name=nobody"),
)

SAMPLED = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "unseeded": {"temperature": 0.8},
}

REQUESTS: dict[str, dict[str, Any]] = {
    "empty prompt": {"prompt": []},
    "unknown token": {"prompt": [65, 300]},
    "prompt too long": {"prompt": [65] * 2000},
    "long workflow_step": {"workflow_step": "x" * 1001},
    "long tools": {"tools": "x" * 1001},
    "template without text": {"templates": ["{all}"]},
    "prefix_tokens": {"prefix_tokens": 3},
    "prefix_tokens too many": {"prefix_tokens": 300},
    "grammar regex": {"grammar": Regex("(")},
    "grammar lark": {"grammar": Lark("start: nothing")},
    "grammar schema": {"grammar": JsonSchema.of({"type": "nothing"})},
    "grammar with a feature": {"grammar": JsonSchema.of({"type": "array", "uniqueItems": True})},
    "bias of an unknown token": {"sampling": {"logit_bias": {300: 1.0}}},
    "stop token unknown": {"sampling": {"stop_token_ids": (300,)}},
    "unknown drafter": {"speculation": {"drafters": ("nobody",)}},
    "mtp": {"speculation": {"drafters": ("mtp",)}},
    "draft model that is not there": {"speculation": {"drafters": ("draft-model",)}},
    "nothing drafts": {"speculation": {"drafters": ()}},
}

FEATURES: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": Regex("(order )+")},
    "penalties": {"sampling": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.3}},
    "logprobs": {"sampling": {"logprobs": 2}},
    "prediction": {"prediction": "order 17"},
    "templates": {"templates": ["order {number}"]},
    "topdown": {"sampling": {"temperature": 0.8}, "speculation": {"mode": "topdown"}},
    "lossy": {"sampling": {"temperature": 0.8}, "speculation": {"mode": "lossy_typical"}},
    "max_nodes 256": {"speculation": {"max_nodes": 256, "max_draws": 64}},
}


def ask(
    engine: Engine,
    prompt: list[int] | None = None,
    sampling: Mapping[str, Any] | None = None,
    speculation: Mapping[str, Any] | None = None,
    **request: Any,
) -> str:
    """Ask for two tokens; returns the mode in which they were verified."""
    asked = SamplingParams(**{"max_tokens": 2, **(sampling or {})})
    config = SpeculationConfig(**(speculation or {}))
    generation = engine.submit(PROMPT if prompt is None else prompt, asked, speculation=config, **request)
    return f"works in mode {generation.result().stats.mode}"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with (
        SpeculationCache.open(None, embedder=HashEmbedder()) as cache,
        closing(Engine(tiny_causal_lm(), byte_tokenizer(), name="tiny", cost=fixed_cost(), cache=cache)) as running,
    ):
        yield running


def test_requests_are_refused_as_recorded(engine: Engine, golden: Golden, tmp_path: Path) -> None:
    modes = {
        f"{mode}, {name}": lambda mode=mode, sampled=sampled: ask(engine, sampling=sampled, speculation={"mode": mode})
        for mode, (name, sampled) in product(MODES, SAMPLED.items())
    }
    requests = {name: lambda given=given: ask(engine, **given) for name, given in REQUESTS.items()}
    golden("refusals/requests", {"modes": outcomes(modes, tmp_path), "requests": outcomes(requests, tmp_path)})


def test_targets_refuse_what_requests_bring_as_recorded(golden: Golden, tmp_path: Path) -> None:
    found = {}
    for name, make in TARGETS.items():
        with closing(Engine(make(), byte_tokenizer(), name=name, cost=fixed_cost())) as running:
            acts = {feature: lambda given=given: ask(running, **given) for feature, given in FEATURES.items()}
            found[name] = outcomes(acts, tmp_path)
    golden("refusals/features", found)


def test_requests_that_do_not_fit_are_refused_as_recorded(golden: Golden, tmp_path: Path) -> None:
    limits = EngineLimits(max_kv_bytes=500_000)
    with closing(Engine(tiny_causal_lm(), byte_tokenizer(), name="tiny", cost=fixed_cost(), limits=limits)) as running:
        acts = {
            "fits": lambda: ask(running),
            "too long an answer": lambda: ask(running, sampling={"max_tokens": 500}),
            "too wide a tree": lambda: ask(running, speculation={"max_nodes": 256, "max_draws": 64}),
        }
        found = outcomes(acts, tmp_path)
    found["closed"] = outcome(lambda: ask(running), tmp_path)
    golden("refusals/limits", found)


# Settings

SETTINGS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: SamplingParams(temperature=-1),
    "temperature nan": lambda: SamplingParams(temperature=float("nan")),
    "temperature text": lambda: SamplingParams(temperature="warm"),  # type: ignore[arg-type]
    "top_k": lambda: SamplingParams(top_k=-1),
    "top_p": lambda: SamplingParams(top_p=0.0),
    "min_p": lambda: SamplingParams(min_p=1.0),
    "repetition_penalty": lambda: SamplingParams(repetition_penalty=0),
    "frequency_penalty": lambda: SamplingParams(frequency_penalty=3),
    "presence_penalty": lambda: SamplingParams(presence_penalty=-3),
    "seed": lambda: SamplingParams(seed=1.5),  # type: ignore[arg-type]
    "max_tokens": lambda: SamplingParams(max_tokens=0),
    "logprobs": lambda: SamplingParams(logprobs=21),
    "stop": lambda: SamplingParams(stop=3),  # type: ignore[arg-type]
    "stop empty": lambda: SamplingParams(stop=("",)),
    "stop many": lambda: SamplingParams(stop=tuple(map(str, range(65)))),
    "stop long": lambda: SamplingParams(stop="x" * 1001),
    "logit_bias": lambda: SamplingParams(logit_bias={3: 101.0}),
    "logit_bias list": lambda: SamplingParams(logit_bias=[3]),  # type: ignore[arg-type]
    "stop_token_ids": lambda: SamplingParams(stop_token_ids=(-1,)),
    "stop_token_ids many": lambda: SamplingParams(stop_token_ids=tuple(range(1025))),
    "sampling unknown": lambda: SamplingParams.from_dict({"temprature": 1}),
    "enabled": lambda: SpeculationConfig(enabled="no"),  # type: ignore[arg-type]
    "max_nodes": lambda: SpeculationConfig(max_nodes=257),
    "max_draws": lambda: SpeculationConfig(max_draws=-1),
    "mode": lambda: SpeculationConfig(mode="nothing"),
    "drafters text": lambda: SpeculationConfig(drafters="recall"),  # type: ignore[arg-type]
    "drafters number": lambda: SpeculationConfig(drafters=("recall", 3)),  # type: ignore[arg-type]
    "speculation unknown": lambda: SpeculationConfig.from_dict({"max_node": 4}),
    "max_running": lambda: EngineLimits(max_running=0),
    "max_kv_bytes": lambda: EngineLimits(max_kv_bytes=0),
    "limits unknown": lambda: EngineLimits.from_dict({"max_runing": 4}),
    "template without text": lambda: Template.parse("{all}"),
    "template of two holes": lambda: Template.parse("Hello {a}{b}"),
    "template unclosed": lambda: Template.parse("Hello {a"),
    "templates many": lambda: Templates(f"order {n}" for n in range(1025)),
}


def test_settings_are_refused_as_recorded(golden: Golden, tmp_path: Path) -> None:
    golden("refusals/settings", outcomes(SETTINGS, tmp_path))


# ChatPrecedent

FIELDS: dict[str, dict[str, Any]] = {
    "no model": {"model": None},
    "model number": {"model": 3},
    "unknown": {"temprature": 1},
    "temperature": {"temperature": "warm"},
    "drafters": {"drafters": "recall"},
    "speculation": {"speculation": "off"},
    "speculation mode": {"speculation": {"mode": "nothing"}},
    "tenant": {"tenant": ""},
    "tenant not printable": {"tenant": "a\nb"},
    "templates": {"templates": ["Hello {a}{b}"]},
    "output_version": {"output_version": "v9"},
    "stop": {"stop": [""]},
    "logprobs": {"top_logprobs": 21},
    "media": {"media": "nothing"},
    "reasoning": {"reasoning": "much"},
    "speculation_cache": {"speculation_cache": 3},
    "max_tokens twice": {"max_tokens": 3, "max_completion_tokens": 4},
    "n": {"n": 2},
    "num_ctx of another library": {"num_ctx": 2048},
    "top_a of another library": {"top_a": 0.5},
}

CALLS: dict[str, dict[str, Any]] = {
    "unknown": {"xyz": 1},
    "temperature": {"temperature": -1},
    "speculation": {"speculation": "on"},
    "speculation unknown": {"speculation": {"max_node": 4}},
    "drafters": {"drafters": "recall"},
    "model": {"model": "other"},
    "response_format": {"response_format": {"type": "xml"}},
    "response_format schema": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "strict": {"strict": "very"},
    "tool_choice without tools": {"tool_choice": "any"},
    "tool_choice unknown": {"tools": ["TOOL"], "tool_choice": "nobody"},
    "n": {"n": 2},
    "tenant": {"tenant": 7},
    "prediction": {"prediction": {"type": "image"}},
    "templates": {"templates": "Hello"},
    "prefix_tokens": {"prefix_tokens": 3},
    "stop": {"stop": 3},
    "seed": {"seed": "x"},
    "device": {"device": "cpu"},
    "fine": {},
}

INPUTS: dict[str, Any] = {
    "empty": [],
    "unknown role": [("narrator", "x")],
    "number": [3],
    "image": [("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])],
    "tool result of no call": [("user", "hi"), {"role": "tool", "content": "x", "tool_call_id": "1"}],
}

TOOLS: dict[str, Any] = {
    "number": 3,
    "no name": {"description": "Search."},
    "bad schema": {"title": "order", "type": "object", "properties": {"a": {"type": "text"}}},
    "empty name": {"type": "function", "function": {"name": "", "parameters": {}}},
}

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def chat_model(**settings: Any) -> ChatPrecedent:
    tokenizer = chatml_tokenizer(chat_template=scripted_tokenizer().chat_template)
    return ChatPrecedent.from_engine(ScriptedEngine(tokenizer, lambda prompt: "fine"), **settings)


def test_chat_models_are_refused_as_recorded(golden: Golden, tmp_path: Path) -> None:
    def call(given: dict[str, Any]) -> None:
        if "tools" in given:
            given = {**given, "tools": [TOOL]}
        chat_model().invoke("hi", **given)

    fields = {
        name: lambda given=given: ChatPrecedent(**{"model": "m", **given}) and None for name, given in FIELDS.items()
    }
    of_engines = {
        name: lambda name=name, value=value: chat_model(**{name: value}) and None
        for name, value in {"speculation_cache": "x.db", "device": "cpu", "loop": "pearl", "bitwise": True}.items()
    }
    calls = {name: lambda given=given: call(given) for name, given in CALLS.items()}
    inputs = {name: lambda given=given: chat_model().invoke(given) and None for name, given in INPUTS.items()}
    tools = {name: lambda given=given: chat_model().bind_tools([given]) and None for name, given in TOOLS.items()}
    twice = {"bound twice": lambda: chat_model().bind_tools([TOOL, {**TOOL, "function": {"name": "look_up"}}]) and None}
    warming = {"warm without a cache": lambda: chat_model().warm([[("user", "hi"), ("ai", "x")]]) and None}
    golden(
        "refusals/chat-models",
        {
            "fields": outcomes(fields, tmp_path),
            "fields of an engine that is there": outcomes(of_engines, tmp_path),
            "calls": outcomes(calls, tmp_path),
            "inputs": outcomes(inputs, tmp_path),
            "tools": outcomes({**tools, **twice}, tmp_path),
            "other": outcomes(warming, tmp_path),
        },
    )


# The command line


def commands(folders: Path) -> dict[str, list[object]]:
    """Commands that end before anything is computed."""
    sound, log = folders / "sound", folders / "log.jsonl"
    log.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (folders / "bad.jsonl").write_text("{\n")
    (folders / "bad.toml").write_text("porrt = 3\n")
    (folders / "cache.sqlite").write_text("this is not a database, but a text of some length\n" * 100)
    run: list[object] = ["run", "hi", "--target", sound]
    return {
        "nothing": [],
        "unknown command": ["nothing"],
        "unknown option": [*run, "--nothing"],
        "run without a prompt": ["run"],
        "run, temperature": [*run, "--temperature", -1],
        "run, temperature text": [*run, "--temperature", "warm"],
        "run, nowhere": ["run", "hi", "--target", folders / "nowhere"],
        "run, damaged": ["run", "hi", "--target", folders / "damaged"],
        "run, draft-device": [*run, "--draft-device", "cpu"],
        "run, pearl": [*run, "--loop", "pearl"],
        "run, cuda-graphs": [*run, "--cuda-graphs", "--device", "cpu"],
        "run, bitwise": [*run, "--bitwise", "--dtype", "float64"],
        "run, device": [*run, "--device", "nowhere"],
        "run, dtype": [*run, "--dtype", "float8"],
        "run, chat-template": [*run, "--chat-template", "{% if"],
        "run, json in no folder": [*run, "--json", folders / "nowhere" / "x.json"],
        "run, cache that is none": [*run, "--cache", folders / "cache.sqlite"],
        "serve, host": ["serve", "--host", "0.0.0.0"],
        "serve, model": ["serve", "--model", "desk"],
        "serve, model twice": ["serve", "--model", f"a={sound}", "--model", f"a={sound}"],
        "serve, config": ["serve", "--config", folders / "bad.toml"],
        "serve, keys": ["serve", "--api-keys", folders / "nowhere.json"],
        "serve, draft-device": ["serve", "--target", sound, "--draft-device", "cpu", "--port", 0],
        "bench, modes": ["bench", "--target", sound, "--modes", "nothing"],
        "bench, draft-device": ["bench", "--target", sound, "--draft-device", "cpu"],
        "replay, nowhere": ["replay", folders / "nowhere.jsonl"],
        "replay, damaged": ["replay", folders / "bad.jsonl", "--tokenizer", sound],
        "replay, no answers": ["replay", log, "--tokenizer", sound],
        "replay, drafters": ["replay", log, "--drafters", "nobody", "--tokenizer", sound],
        "replay, pool": ["replay", log, "--pool", "nothing", "--tokenizer", sound],
        "replay, budget": ["replay", log, "--budget", "x", "--tokenizer", sound],
        "replay, curve": ["replay", log, "--curve", "nothing", "--tokenizer", sound],
        "replay, ablate": ["replay", log, "--ablate", "nothing", "--tokenizer", sound],
        "replay, split": ["replay", log, "--split", "test", "--tokenizer", sound],
        "doctor, nowhere": ["doctor", folders / "nowhere"],
        "models, unknown": ["models", "nobody"],
        "cache stats, nowhere": ["cache", "stats", folders / "nowhere"],
        "cache stats, damaged": ["cache", "stats", folders / "cache.sqlite"],
        "cache stats, scheme": ["cache", "stats", "ftp://user:secret@nowhere/cache"],
        "cache forget, nothing": ["cache", "forget", folders / "nowhere"],
        "cache import, nowhere": ["cache", "import", folders / "new", folders / "nowhere"],
        "keys list, nowhere": ["keys", "list", "--file", folders / "nowhere.json"],
        "keys revoke, nowhere": ["keys", "revoke", "desk", "--file", folders / "nowhere.json"],
        "train-draft, prompts": ["train-draft", "--target", sound, "--prompts", folders / "nowhere.jsonl"],
        "train-judge": ["train-judge", "--target", sound],
        "demo, json in no folder": ["demo", "--json", folders / "nowhere" / "x.json"],
    }


@pytest.mark.enable_socket
def test_commands_are_refused_as_recorded(
    golden: Golden, folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    found = {}
    for name, arguments in commands(folders).items():
        status, told = precedent(*arguments), capsys.readouterr().err
        said = [line for line in told.splitlines() if line.startswith("error:")]
        found[name] = f"exit {status}: {normalised(' '.join(said), folders)}"
    golden("refusals/commands", found)
