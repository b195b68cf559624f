"""An engine whose mode has a judge: what the judge is shown, in whole requests, and what nobody else pays for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from helpers.judges import install_judges
from helpers.tiny_draft import tiny_target

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError
from precedent.planning.costs import CostCurve
from precedent.sampling.target_rows import TargetRows
from precedent.target.fingerprints import name_of
from precedent.tree import CandidateTree
from precedent_research.judge import TrainedJudge, draft_logits_of
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TOKENIZER, PROMPT = byte_tokenizer(), tuple(range(40, 60))
MODE = "lossy_judge:name=watching"


class Watching:
    """Overrules every other rejection, and keeps what it was shown."""

    def __init__(self, reads_hidden_states: bool = False) -> None:
        self.reads_hidden_states, self.seen = reads_hidden_states, list[dict[str, Any]]()

    def __call__(self, tree: CandidateTree, rows: TargetRows, node: int) -> float:
        self.seen.append(
            {
                "path": tree.tokens_to(node),
                "row": rows.logits(tree.parents[node]).clone(),
                "draft": draft_logits_of(tree, node),
                "hidden": rows.hidden(node).clone() if self.reads_hidden_states else None,
            }
        )
        return float(len(self.seen) % 2)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Install a judge under the name `watching`."""

    def installed(judge: Any) -> Any:
        install_judges(monkeypatch, watching=judge)
        return judge

    return installed


def engine_of(mode: str, **settings: Any) -> Engine:
    """Target and draft model; the draft disagrees nearly everywhere."""
    speculation = SpeculationConfig(drafters=("draft-model",), mode=mode, max_draws=3)
    options = EngineOptions(draft_model=tiny_draft(), speculation=speculation)
    return Engine(tiny_target(), TOKENIZER, options, name="tiny", cost=CostCurve(), **settings)


def tiny_draft() -> Any:
    return tiny_causal_lm(hidden_size=32, num_hidden_layers=1, seed=5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_judge_sees_both_models_rows_and_the_targets_hidden_state(install: Any, temperature: float) -> None:
    """Against transformers, behind the answer so far, both under the bias that keeps an answer from ending early."""
    judge = install(Watching(reads_hidden_states=True))
    endless = dict.fromkeys(TOKENIZER.all_special_ids, -100.0)
    sampling = SamplingParams(temperature=temperature, max_tokens=16, logit_bias=endless)
    with closing(engine_of(MODE)) as engine:
        result = engine.submit(PROMPT, sampling).result()
    assert len(result.token_ids) == 16
    assert result.stats.spent_tv >= 1.0
    assert len(judge.seen) > 3
    target, draft, checked = tiny_target(), tiny_draft(), 0
    for seen in judge.seen:
        for end in range(len(result.token_ids) + 1):
            ids = torch.tensor([[*PROMPT, *result.token_ids[:end], *seen["path"]]])
            with torch.no_grad():
                found, drafted = target(ids, output_hidden_states=True), draft(ids)
            if torch.allclose(found.hidden_states[-1][0, -1], seen["hidden"], atol=1e-9):
                for logits, shown in ((found.logits, seen["row"]), (drafted.logits, seen["draft"])):
                    row = logits[0, -2]
                    row[list(endless)] -= 100.0
                    torch.testing.assert_close(row, shown)
                checked += 1
                break
    assert checked == len(judge.seen)


def test_hidden_states_are_kept_for_those_who_read_them_alone(install: Any) -> None:
    """A judge that does not read them, and a lossless engine, keep none; a request cannot ask for them afterwards."""
    install(Watching())
    for mode in (MODE, "auto"):
        with closing(engine_of(mode)) as engine:
            assert engine.target.runner.hidden is None
    install(Watching(reads_hidden_states=True))
    with closing(engine_of("auto")) as engine:
        asked = SpeculationConfig(mode=MODE)
        with pytest.raises(ConfigError, match="hidden states, which are kept from the engine's start"):
            engine.submit(PROMPT, SamplingParams(), speculation=asked)


def test_a_judge_of_another_model_is_refused_or_said(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By the size of the hidden states, at the engine's start and by request; another name is a warning."""
    install(Watching(reads_hidden_states=True))
    with closing(engine_of(MODE)) as engine:
        install(TrainedJudge(("margin", "hidden"), (0.0,) * 6, 0.0, 0.5))
        with pytest.raises(
            ConfigError, match="trained on hidden states of 5 numbers, and this target's have 32: train"
        ):
            engine.submit(PROMPT, SamplingParams(), speculation=SpeculationConfig(mode=MODE))
    with pytest.raises(ConfigError, match="hidden states of 5 numbers"):
        engine_of(MODE)
    for name, warned in (("another", True), (name_of(tiny_target()), False), ("", False)):
        install(TrainedJudge(("margin",), (0.0,), 0.0, 0.5, target=name))
        caplog.clear()
        engine_of(MODE).close()
        assert ("of this mode was trained for another" in caplog.text) == warned


def test_drafters_keep_their_logits_for_a_judge_alone(install: Any) -> None:
    """A step of any other mode holds no more than it did."""
    install(Watching())
    for mode, kept in ((MODE, True), ("lossy_typical", False), ("auto", False)):
        trees = list[CandidateTree]()
        with closing(engine_of(mode)) as engine:
            engine.watch_steps(lambda verified, token_ids, trees=trees: trees.append(verified.rows.tree))
            engine.submit(PROMPT, SamplingParams(temperature=1.0, max_tokens=8)).result()
        assert trees
        logits = [getattr(each.distribution, "logits", None) for tree in trees for each in tree.candidates]
        assert all((each is not None) == kept for each in logits), mode
