"""Drafts trained to read their target's hidden states: what they read, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from helpers.conditioned import opinionated_weights, random_conditioned
from helpers.hybrids import prefilled
from transformers import PreTrainedModel

from precedent.drafters import load_draft
from precedent.errors import ConfigError, ModelLoadError
from precedent.target import TargetModel
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint
from precedent_drafts.conditioned import TOKEN_GUIDED, fusion_from, fusion_of
from precedent_drafts.head import HeadModel, reading_hidden_states
from precedent_drafts.trained import DraftSettings, save_draft
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

TINY = {"vocab_size": 16, "num_hidden_layers": 3, "hidden_size": 16, "seed": 31}


def draft_of(model: PreTrainedModel, fusion: str = TOKEN_GUIDED, head: Sequence[int] | None = None) -> PreTrainedModel:
    ids = range(model.config.vocab_size) if head is None else head
    return random_conditioned(model, (2,), fusion, opinionated_weights(model, 2, fusion, ids))


def beside(model: PreTrainedModel, **settings: object) -> tuple[TargetModel, HeadModel]:
    target = TargetModel(model)
    return target, reading_hidden_states(draft_of(model, **settings), target, feeds_back_normed=True)


def test_it_reads_the_targets_states() -> None:
    """Its rows depend on them: behind another text with the same last tokens they differ."""
    target, head = beside(tiny_causal_lm("llama", **TINY))
    rows = []
    for first in (3, 4):
        slot, drafted = prefilled(target, [first, 7, 7, 7]), head.new_slot()
        head.bind(drafted, lambda slot=slot: slot)  # type: ignore[misc]
        head.prefill(drafted, [7, 7, 7])
        rows.append(head.plain_step(drafted)[0])
    assert not torch.allclose(*rows)


def test_engines_that_share_a_draft_do_not_mix_their_states() -> None:
    """What one thread hands in, another does not read."""
    model = tiny_causal_lm("llama", **TINY)
    inputs: Any = draft_of(model).get_input_embeddings()
    tokens, states = torch.tensor([[3, 4]]), torch.ones(2, 16, dtype=torch.float64)
    with torch.no_grad():
        bare = inputs(tokens)
        other = Thread(target=lambda: inputs.give([5 * states]))
        other.start()
        other.join()
        assert torch.equal(inputs(tokens), bare)
        inputs.give([states])
        assert not torch.equal(inputs(tokens), bare)
        inputs.give([])
        assert torch.equal(inputs(tokens), bare)


def test_a_device_of_its_own_is_refused(tmp_path: Path) -> None:
    """It runs where its target is."""
    model = tiny_causal_lm()
    settings = DraftSettings(
        "tiny", embeddings_fingerprint(model), layers_fingerprint(model), (2,), 259, fusion=TOKEN_GUIDED
    )
    save_draft(tmp_path, settings, opinionated_weights(model, 2, TOKEN_GUIDED, range(259)))
    assert load_draft(tmp_path, model, byte_tokenizer()).dtype == model.dtype
    with pytest.raises(ConfigError, match="runs beside its target, on cpu: leave out draft_device"):
        load_draft(tmp_path, model, byte_tokenizer(), device="meta")


def test_weights_that_do_not_fit_are_refused() -> None:
    """Missing ones, and a fusion of a later version."""
    model = tiny_causal_lm()
    with pytest.raises(ModelLoadError, match="the weights of the fusion do not fit"):
        fusion_from(TOKEN_GUIDED, model, {})
    with pytest.raises(ModelLoadError, match="does not know: 'loud'"):
        fusion_of("loud", 8)
