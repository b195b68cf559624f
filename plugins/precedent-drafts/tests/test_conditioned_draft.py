"""A draft that reads its target's hidden states: exact, plain decoding's text, and what it cannot be beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from helpers.conditioned import opinionated_weights, random_conditioned
from helpers.enumeration import check_drawn_step
from helpers.hybrids import prefilled
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams
from precedent.drafters import load_draft
from precedent.drafters.request import Request
from precedent.errors import ConfigError, ModelLoadError
from precedent.sampling.rng import Rng
from precedent.target import TargetModel
from precedent.target.fingerprints import embeddings_fingerprint, layers_fingerprint
from precedent.testing.draft_distribution import check_draft_distribution
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm
from precedent.tree import ROOT, TreeBuilder
from precedent_drafts.conditioned import TOKEN_GUIDED, fusion_from, fusion_of
from precedent_drafts.head import HeadDrafter, HeadModel, reading_hidden_states
from precedent_drafts.trained import DraftSettings, save_draft

PROMPT = [1, 2, 1, 0]
TINY = {"vocab_size": 16, "num_hidden_layers": 3, "hidden_size": 16, "seed": 31}


def draft_of(model: PreTrainedModel, fusion: str = TOKEN_GUIDED, head: Sequence[int] | None = None) -> PreTrainedModel:
    ids = range(model.config.vocab_size) if head is None else head
    return random_conditioned(model, (2,), fusion, opinionated_weights(model, 2, fusion, ids))


def beside(model: PreTrainedModel, **settings: object) -> tuple[TargetModel, HeadModel]:
    target = TargetModel(model)
    return target, reading_hidden_states(draft_of(model, **settings), target, feeds_back_normed=True)


@cache
def pair(head: tuple[int, ...] = (0, 1, 2)) -> tuple[TargetModel, HeadModel]:
    """A target of three tokens, and a draft with strong opinions of its own."""
    return beside(tiny_causal_lm(vocab_size=3, hidden_size=16, num_hidden_layers=3, scale=0.3, seed=4), head=head)


@cache
def next_token(after: tuple[int, ...]) -> Tensor:
    """The target's own distribution behind the prompt and these tokens."""
    with torch.inference_mode():
        return pair()[0].model(torch.tensor([[*PROMPT, *after]])).logits[0, -1].softmax(-1)


def drawn_below(fixed: tuple[int, ...], head: tuple[int, ...] = (0, 1, 2)) -> Callable[[TreeBuilder, Rng], None]:
    target, draft = pair(head)

    def drawing(builder: TreeBuilder, rng: Rng) -> None:
        slot = prefilled(target, PROMPT)
        asked = Request("r", tuple(PROMPT), SamplingParams(temperature=1.0), mode="traversal", target_slot=lambda: slot)
        for token in fixed:
            builder.add_fixed(ROOT, token, "recall")
        HeadDrafter("draft-model", draft).begin(asked).draw(builder, 2, rng)

    return drawing


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
@pytest.mark.parametrize(("fixed", "head"), [((), (0, 1, 2)), ((1,), (0, 1, 2)), ((2,), (0, 2))])
def test_a_sampled_step_is_exact(mode: str, fixed: tuple[int, ...], head: tuple[int, ...]) -> None:
    """Every tree that it draws, and every verdict on it."""
    check_drawn_step(next_token, drawn_below(fixed, head), mode)


def test_samples_carry_the_distribution_they_were_sampled_from() -> None:
    """Beside a cached sibling."""
    check_draft_distribution(drawn_below((1,)))


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


# Refusals


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
