"""What breaks inside a request is its own error, named by its place, and bends no answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers.small_engines import PLAIN, PROMPT, make_engine, poison

from precedent.cache import Completion, SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import CacheError, GenerationError
from precedent.planning.costs import CostCurve
from precedent.target import Slot
from precedent.tree import CandidateTree
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


def test_logits_that_are_nan_fail_the_request_and_not_the_engine() -> None:
    """The error names the position; the next request is served."""
    model = tiny_causal_lm("llama", seed=23)
    running = Engine.load(model, tokenizer=byte_tokenizer())
    head = model.get_output_embeddings().weight
    healthy = head.detach().clone()
    with torch.no_grad():
        head.fill_(torch.nan)
    with pytest.raises(GenerationError, match="output position 0"):
        running.submit(PROMPT, SamplingParams(max_tokens=4)).result()
    with torch.no_grad():
        head.copy_(healthy)
    assert running.submit(PROMPT, SamplingParams(max_tokens=4)).result().finish_reason == "length"
    running.close()


def test_broken_logits_inside_a_drafted_answer_are_named_by_their_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was proposed behind them, and however many tokens a step accepts: the first broken row is the error."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running, sampling = make_engine(cache), SamplingParams(max_tokens=20)
        running.submit(PROMPT, sampling, query="order").result()
        score, broken_at = running.target.score, 9

        def broken_score(batch: Sequence[tuple[Slot, CandidateTree]]) -> list[torch.Tensor]:
            scored = [logits.clone() for logits in score(batch)]
            for (slot, tree), logits in zip(batch, scored, strict=True):
                first = len(slot.token_ids) + 1 - len(PROMPT)
                for row, depth in enumerate((0, *tree.depths.tolist())):
                    logits[row, 3] = torch.nan if first + depth == broken_at else logits[row, 3]
            return scored

        monkeypatch.setattr(running.target, "score", broken_score)
        for speculation in (PLAIN, SpeculationConfig(drafters=("recall",))):
            generation = running.submit(PROMPT, sampling, speculation=speculation, query="order")
            with pytest.raises(GenerationError, match=f"output position {broken_at} hold NaN"):
                generation.result()
        assert running.metrics().num_draft_tokens > 0
        running.close()


def test_a_draft_model_whose_probabilities_are_nan_is_left_out_and_bends_no_answer() -> None:
    """Sampling compares with the distribution that was drawn from; a proposal by argmax needs none."""
    draft = tiny_causal_lm("llama", seed=22, num_hidden_layers=1)
    with torch.no_grad():
        draft.get_output_embeddings().weight[7] = torch.nan
    running, only = make_engine(draft_model=draft), SpeculationConfig(drafters=("draft-model",))
    sampled = running.submit(PROMPT, SamplingParams(temperature=1.0, max_tokens=9), speculation=only).result()
    assert len(sampled.token_ids) == 9
    assert running.metrics().faults["draft-model"] == 1
    greedy = running.submit(PROMPT, SamplingParams(max_tokens=9), speculation=only).result()
    plain = running.submit(PROMPT, SamplingParams(max_tokens=9), speculation=PLAIN).result()
    running.close()
    assert greedy.token_ids == plain.token_ids


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_padded_output_rows_are_never_emitted(temperature: float) -> None:
    """A head with more rows than the tokenizer has tokens, which the model loves: masked, also where it is proposed."""
    model, sampling = tiny_causal_lm("llama", vocab_size=400), SamplingParams(temperature=temperature, max_tokens=60)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[259:] = 3.0 * head[:141]
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        running = Engine.load(model, tokenizer=byte_tokenizer(), cache=cache)
        running.planner.cost = CostCurve()
        answer = running.submit(PROMPT, sampling, speculation=PLAIN).result().token_ids
        poison(cache, running, answer)
        for _ in range(3):
            answer = running.submit(PROMPT, sampling, query="order").result().token_ids
            assert max(answer) < len(byte_tokenizer())
        running.close()


def test_a_failing_cache_never_fails_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Write-back errors are logged and counted; the caller gets the answer."""
    cache = SpeculationCache.open(None, embedder=HashEmbedder())
    running = make_engine(cache)

    def refuse(completion: Completion) -> int:
        raise CacheError("the disk is full")

    cache.insert = refuse  # type: ignore[method-assign]
    for _ in range(4):
        assert len(running.submit(PROMPT, SamplingParams(max_tokens=4), query="q").result().token_ids) == 4
    assert running.metrics().faults["write-back"] == 3, "it is not tried a fourth time"
    assert running.health().degraded == ("write-back",)
    running.close()
    assert caplog.text.count("write-back is switched off") == 1
    assert "the disk is full" in caplog.text
