"""Kinds of drafts that packages bring: how an engine finds, prepares and uses them, and what it says without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.small_engines import PLAIN, PROMPT

from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.drafters import DrafterParts, check_known, load_draft
from precedent.engine.engine import Engine
from precedent.errors import CapacityError, ConfigError, ModelLoadError
from precedent.planning.costs import CostCurve
from precedent.target.load.first_layers import first_layers
from precedent.target.load.loading import load_target
from precedent_testing.drafters import OracleDrafter
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

OUR_FILE = "oracle.json"


class Oracle:
    """A kind whose drafts are a folder with the answer, and whose drafter proposes it."""

    name = "oracle"

    def __init__(self) -> None:
        self.prepared: list[Any] = []

    def recognises(self, source: object, target: Any = None) -> str | None:
        if isinstance(source, str | Path):
            return "an oracle" if (Path(source) / OUR_FILE).is_file() else None
        return "a loaded oracle" if hasattr(source, "foretold") else None

    def load(self, source: str | Path, target: Any) -> Any:
        draft = first_layers(target, 1)
        draft.foretold = json.loads((Path(source) / OUR_FILE).read_text())  # type: ignore[assignment]
        return draft

    def beside(self, target: Any, draft: Any) -> Any:
        self.prepared.append(draft)
        target.keep_hidden_states()
        return None if draft is None else draft.foretold

    def drafter(self, parts: DrafterParts) -> Any:
        foretold = parts.heads.get(self.name)
        return None if foretold is None else Foretelling(foretold)


class Foretelling(OracleDrafter):
    """Proposes the rest of the answer, and says what a request takes."""

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, speculation: SpeculationConfig) -> int:
        return 10**6 * answer_tokens


def registering(monkeypatch: pytest.MonkeyPatch, **registered: Any) -> None:
    """Let only these objects be registered; an exception is raised where it would be imported."""

    def load(found: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    entries = [SimpleNamespace(name=name, load=partial(load, found)) for name, found in registered.items()]
    monkeypatch.setattr("precedent.drafters.registry.entry_points", lambda group: entries)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    kind = Oracle()
    registering(monkeypatch, oracle=kind)
    return kind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with engine_on(None) as engine:
        answer = engine.submit(PROMPT, SamplingParams(max_tokens=12), speculation=PLAIN).result()
    (tmp_path / OUR_FILE).write_text(json.dumps(answer.token_ids))
    return tmp_path


@contextmanager
def engine_on(draft: Any, **settings: Any) -> Iterator[Engine]:
    engine = Engine(tiny_causal_lm(), byte_tokenizer(), name="tiny", draft_model=draft, cost=CostCurve(), **settings)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("names", [None, ("draft-model",), ("oracle",), ("draft-model", "oracle")])
def test_a_draft_of_a_kind_drafts_as_the_draft_model(
    oracle: Oracle, folder: Path, names: tuple[str, ...] | None
) -> None:
    """By default, and under either name: the same drafter, once."""
    speculation = SpeculationConfig() if names is None else SpeculationConfig(drafters=names)
    with engine_on(folder, speculation=speculation) as engine:
        result = engine.submit(PROMPT, SamplingParams(max_tokens=12)).result()
        assert engine.drafters.count("oracle") == 1
    assert list(result.token_ids) == json.loads((folder / OUR_FILE).read_text())
    assert result.stats.accepted_by_source["oracle"] > 6
    assert len(oracle.prepared) == 1


def test_a_loaded_draft_is_recognised(oracle: Oracle, folder: Path) -> None:
    """It goes on as it is."""
    model = tiny_causal_lm()
    draft = load_draft(folder, model, byte_tokenizer())
    assert load_draft(draft, model, byte_tokenizer()) is draft
    with pytest.raises(ConfigError, match=r"runs beside its target, on cpu: leave out draft_device"):
        load_draft(folder, model, byte_tokenizer(), device="meta")


def test_nothing_is_prepared_where_no_drafter_names_it(oracle: Oracle, folder: Path) -> None:
    """The target then keeps nothing for it."""
    with engine_on(folder, speculation=SpeculationConfig(drafters=("prompt",))) as engine:
        assert oracle.prepared == []
        assert engine.target.runner.hidden is None
        assert "oracle" not in engine.drafters


def test_a_kind_is_prepared_without_a_draft_where_it_is_named(oracle: Oracle) -> None:
    """Such as one that comes with the target; here it has nothing to draft with."""
    with engine_on(None, speculation=SpeculationConfig(drafters=("oracle",))) as engine:
        assert oracle.prepared == [None]
        assert engine.drafters == ()


def test_a_request_reserves_what_its_drafters_say(oracle: Oracle, folder: Path) -> None:
    with engine_on(folder, limits=EngineLimits(max_kv_bytes=10**7)) as engine:
        engine.submit(
            PROMPT, SamplingParams(max_tokens=12), speculation=SpeculationConfig(drafters=("prompt",))
        ).result()
        with pytest.raises(CapacityError, match="max_kv_bytes"):
            engine.submit(PROMPT, SamplingParams(max_tokens=12))


def test_a_package_that_cannot_be_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading any other draft goes on; naming its drafter says what is wrong."""
    registering(monkeypatch, broken=ImportError("no such thing"))
    draft = tiny_causal_lm()
    assert load_draft(draft, tiny_causal_lm(), byte_tokenizer()) is draft
    assert "the drafter 'broken' cannot be loaded and is left out" in caplog.text


@pytest.mark.parametrize("name", ["eagle", "block-draft", "mtp"])
def test_a_drafter_of_a_missing_package_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    registering(monkeypatch)
    with pytest.raises(ConfigError, match=rf"'{name}' is not installed: pip install 'precedent-llm\[drafts\]'"):
        check_known([name])
    with (
        pytest.raises(ConfigError, match=r"pip install 'precedent-llm\[drafts\]'"),
        engine_on(None, speculation=SpeculationConfig(drafters=(name,))),
    ):
        pass


FOLDERS = {
    "trained": ("draft.json", {"target": "a-model"}),
    "block": ("config.json", {"kind": "precedent-block-draft", "format": 1}),
    "speculators": ("config.json", {"speculators_model_type": "eagle3"}),
    "DFlash": ("config.json", {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}),
    "a head": ("config.json", {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 100}),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_draft_of_a_missing_package_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """Whatever format it has; and as a target it is none, with the package or without."""
    registering(monkeypatch)
    file, content = FOLDERS[what]
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"holds a draft .*pip install 'precedent-llm\[drafts\]'"):
        load_draft(tmp_path, tiny_causal_lm(), byte_tokenizer())
    with pytest.raises(ModelLoadError, match=r"holds a draft .*give it as the draft model"):
        load_target(tmp_path)
