"""`model.generate(..., custom_generate=precedent.generate)`: the same tokens and the same law as `generate` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.generating import NEW, PROMPT, VOCABULARY, BanLast, Listener, SumStop, both, made, prompts
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

import precedent
from precedent.sampling.coupling import coupled_choice
from precedent_testing.drafters import NullDrafter, OracleDrafter, RandomDrafter
from precedent_testing.sweep import tiny_model

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[22], [15, 10]]},
    "eos": {"eos_token_id": [20, 21, 22, 23, 24, 25], "pad_token_id": 0},
    "min_new_tokens": {"eos_token_id": list(range(20, 40)), "pad_token_id": 0, "min_new_tokens": 9},
    "max_length": {"max_length": len(PROMPT) + 7, "max_new_tokens": None},
    "sequence_bias": {"sequence_bias": [[[30], 9.0], [[30, 31], 20.0]]},
    "suppress": {"suppress_tokens": [1, 2, 3, 30, 31], "begin_suppress_tokens": [4, 5, 6, 7]},
    "forced_eos": {"forced_eos_token_id": 20, "eos_token_id": 20, "pad_token_id": 0},
    "decay": {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 20, "pad_token_id": 0},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] * k + 1) % 64 for k in (2, 3, 5)]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=5.0)},
    "own": {
        "logits_processor": LogitsProcessorList([BanLast()]),
        "stopping_criteria": StoppingCriteriaList([SumStop(len(PROMPT), 400)]),
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_text_is_that_of_generate(model: PreTrainedModel, name: str) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False, **SETTINGS[name]}
    alone, ours = both(model, prompts(PROMPT), **settings)
    assert ours.tolist() == alone.tolist()
    assert ours.dtype == alone.dtype


def test_the_settings_differ_from_plain_decoding(model: PreTrainedModel) -> None:
    """Each of them changes this very text, so that dropping it would be seen."""
    plain = model.generate(**prompts(PROMPT), max_new_tokens=NEW, do_sample=False).tolist()
    same = [
        name
        for name, settings in SETTINGS.items()
        if model.generate(**prompts(PROMPT), **{"max_new_tokens": NEW, "do_sample": False, **settings}).tolist()
        == plain
    ]
    assert same == ["plain"]


@pytest.mark.parametrize(("make", "model_type"), [(made, "gpt_neox"), (tiny_model, "qwen3_next"), (tiny_model, "zaya")])
def test_greedy_text_is_that_of_generate_on_other_architectures(
    make: Callable[[str], PreTrainedModel], model_type: str
) -> None:
    """Hybrids with their states, too; and the caller's model computes as before, with its own class, afterwards."""
    hybrid = make(model_type)
    classes = [type(module) for module in hybrid.modules()]
    settings = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    alone, ours = both(hybrid, prompts(PROMPT), **settings)
    assert ours.tolist() == alone.tolist()
    assert [type(module) for module in hybrid.modules()] == classes
    assert hybrid.generate(**prompts(PROMPT), **settings).tolist() == alone.tolist()


def test_drafts_are_accepted(model: PreTrainedModel) -> None:
    """The equality above is not that of plain decoding in disguise: a right guess saves steps, processors or not."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.7}
    answer = model.generate(**prompts(PROMPT), **settings)[0, len(PROMPT) :].tolist()
    oracle = {"custom_generate": precedent.generate, "drafters": [OracleDrafter(answer)]}
    ours = model.generate(**prompts(PROMPT), **settings, **oracle, return_dict_in_generate=True)
    (counted,) = ours.speculation
    assert counted["num_steps"] <= 4
    assert counted["accepted_by_source"]["oracle"] >= NEW - 4


def test_rows_of_a_batch_are_those_of_generate(model: PreTrainedModel) -> None:
    """Left padding, rows that end apart, and processors that know their row."""
    rows = (PROMPT, [3, 4, 5], [50, 51, 52, 53, 50, 51])
    settings = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "eos_token_id": list(range(20, 30)),
        "pad_token_id": 0,
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "logits_processor": LogitsProcessorList([BanLast()]),
        "stopping_criteria": StoppingCriteriaList([SumStop(len(PROMPT), 600)]),
        "prefix_allowed_tokens_fn": lambda row, ids: range(row * 5, 60),
    }
    alone, ours = both(model, prompts(*rows), **settings)
    assert ours.tolist() == alone.tolist()
    assert len({row.index(0, len(PROMPT)) if 0 in row[len(PROMPT) :] else -1 for row in ours.tolist()}) > 1


def test_sampled_tokens_are_drawn_from_the_processed_rows_of_generate(model: PreTrainedModel) -> None:
    """Every token is the choice of the seed's noise among the probabilities that transformers computes there.

    Whatever is proposed: so the distribution is that of `generate`.
    """
    settings = {
        "do_sample": True,
        "temperature": 1.3,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
    }
    torch.manual_seed(11)
    seed = int(torch.randint(2**62, ()))
    torch.manual_seed(11)
    inputs = prompts(PROMPT)
    drafted = {"custom_generate": precedent.generate, "drafters": [RandomDrafter(VOCABULARY, seed=2), "prompt"]}
    ours = model.generate(**inputs, **settings, max_new_tokens=NEW, **drafted)[0].tolist()
    for place in range(NEW):
        row = _next_row(model, torch.tensor([ours[: len(PROMPT) + place]]), settings)
        assert coupled_choice(row.softmax(0), seed, place) == ours[len(PROMPT) + place]


def _next_row(model: PreTrainedModel, ids: Tensor, settings: dict[str, Any]) -> Tensor:
    """The scores of the next token as transformers processes them."""
    asked = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **asked).scores[0][0]


def test_scores_and_logits_are_those_of_generate(model: PreTrainedModel) -> None:
    settings = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.5}
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    alone, ours = both(model, prompts(PROMPT), **settings, **asked)
    assert ours.sequences.tolist() == alone.sequences.tolist()
    for kind in ("scores", "logits"):
        theirs, mine = getattr(alone, kind), getattr(ours, kind)
        assert len(mine) == len(theirs) == 12
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-6, atol=1e-6)
    assert ours.past_key_values is None


class OpenAIs(LogitsProcessor):
    """OpenAI's penalties and biases, token by token, for who has no other way: `generate` does not know them."""

    def __init__(self, frequency_penalty: float = 0.0, presence_penalty: float = 0.0, logit_bias: Any = None) -> None:
        self.frequency, self.presence, self.bias = frequency_penalty, presence_penalty, logit_bias or {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, len(PROMPT) :].tolist()):
            for token in range(scores.shape[1]):
                lost = ids.count(token) * self.frequency + (token in ids) * self.presence
                scores[row, token] += self.bias.get(token, 0.0) - lost
        return scores


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.2},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {30: 3.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.sampled(2)
def test_openais_penalties_are_those_of_a_processor_of_ones_own(
    model: PreTrainedModel, penalties: dict[str, Any], sampled: bool
) -> None:
    """Also for several rows, beside the repetition penalty, and before temperature and truncation."""
    inputs = prompts(PROMPT, [9, 8, 7, 6, *PROMPT[4:]])
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": sampled, "repetition_penalty": 1.1}
    settings |= {"temperature": 0.7, "top_k": 9} if sampled else {}
    ours_alone = {"custom_generate": precedent.generate, "drafters": ["prompt", RandomDrafter(VOCABULARY, seed=1)]}

    def text(**how: Any) -> list[list[int]]:
        torch.manual_seed(5)
        return model.generate(**inputs, **settings, **how).tolist()

    expected = text(logits_processor=LogitsProcessorList([OpenAIs(**penalties)]), **(ours_alone if sampled else {}))
    assert text(**ours_alone, **penalties) == expected != text(**ours_alone)


def test_a_streamer_hears_what_it_hears_from_generate(model: PreTrainedModel) -> None:
    settings = {"max_new_tokens": 12, "do_sample": False}
    theirs, mine = Listener(), Listener()
    model.generate(**prompts(PROMPT), **settings, streamer=theirs)
    model.generate(**prompts(PROMPT), **settings, streamer=mine, custom_generate=precedent.generate)
    assert mine.heard == theirs.heard
    assert mine.heard[-1] == "end"


class Interrupting(StoppingCriteria):
    """A criterion that breaks at its n-th question."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self.left -= 1
        if self.left <= 0:
            raise KeyError("criterion")
        return False


@pytest.mark.parametrize("at", [1, 5])
def test_what_breaks_in_the_middle_leaves_the_next_call_as_it_was(model: PreTrainedModel, at: int) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**prompts(PROMPT), **settings)
    ended = Watched()
    breaks = {"drafters": [ended], "stopping_criteria": StoppingCriteriaList([Interrupting(at)])}
    with pytest.raises(KeyError, match="criterion"):
        model.generate(**prompts(PROMPT), **settings, **breaks, custom_generate=precedent.generate)
    assert ended.ended == 1
    with pytest.raises(OSError, match="nobody listens"):
        model.generate(**prompts(PROMPT), **settings, custom_generate=precedent.generate, streamer=Listener(at))
    ours = model.generate(**prompts(PROMPT), **settings, custom_generate=precedent.generate)
    assert ours.tolist() == expected.tolist()


class Watched(NullDrafter):
    """Counts the requests that were ended."""

    ended = 0

    def begin(self, request: Any) -> Any:
        session, outer = super().begin(request), self
        end = session.end

        def noted() -> None:
            outer.ended += 1
            end()

        session.end = noted
        return session
