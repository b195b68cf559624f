"""`model.generate(..., custom_generate=precedent.generate)`: the same tokens and the same law as `generate` alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

import precedent
from precedent.cache import SpeculationCache
from precedent.custom_generate import prepared
from precedent.custom_generate.prepared import prepared_for
from precedent.errors import ConfigError, GenerationError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.sampling.coupling import coupled_choice
from precedent.target import TargetModel
from precedent.testing.drafters import NullDrafter, OracleDrafter, RandomDrafter
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm

VOCABULARY = 64
PROMPT = [7, 8, 9, 10, 7, 8, 9, 11, 7, 8]
NEW = 24


class FlatCost(CostCurve):
    """Every width costs the same: the trees do not hang on the clock of a busy machine."""

    def observe(self, width: int, milliseconds: float) -> None:
        """Learn nothing."""


def made(model_type: str = "llama", **settings: Any) -> PreTrainedModel:
    """A tiny float64 model that speculates as much as it can."""
    model = tiny_causal_lm(model_type, **{"vocab_size": VOCABULARY, "num_hidden_layers": 2, "seed": 5, **settings})
    prepared_for(model).planner.cost = FlatCost()
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return made()


def prompts(*rows: Sequence[int], pad: int = 0) -> dict[str, Tensor]:
    """Input ids and attention mask, padded on the left."""
    longest = max(map(len, rows))
    padded = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def both(
    model: PreTrainedModel, inputs: dict[str, Tensor], drafters: Sequence[Any] | None = None, **settings: Any
) -> tuple[Any, Any]:
    """What generate gives alone, and with our loop behind it: by default with every answer's oracle as drafter."""
    alone = model.generate(**inputs, **settings)
    if drafters is None:
        sequences = alone if isinstance(alone, Tensor) else alone.sequences
        answer = sequences[0, inputs["input_ids"].shape[1] :].tolist()
        drafters = [OracleDrafter([*answer[:6], 3, *answer[7:]]), RandomDrafter(VOCABULARY, seed=1), "prompt"]
    ours = model.generate(**inputs, **settings, custom_generate=precedent.generate, drafters=drafters)
    return alone, ours


class BanLast(LogitsProcessor):
    """A user's own processor: never the same token twice in a row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


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
        {"frequency_penalty": 0.6},
        {"presence_penalty": 1.2},
        {"logit_bias": {30: 6.0, 31: -2.0}},
        {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {30: 3.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("sampled", [False, True])
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"frequency_penalty": 3}, "frequency_penalty=3 must be a number between -2 and 2"),
        ({"logit_bias": {VOCABULARY: 1}}, f"logit_bias names token id {VOCABULARY}"),
    ],
)
def test_wrong_penalties_are_refused(model: PreTrainedModel, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model.generate(**prompts(PROMPT), custom_generate=precedent.generate, max_new_tokens=NEW, **wrong)


class SumStop(StoppingCriteria):
    """A user's own criterion: stops when the ids of the answer add up to more than enough."""

    def __init__(self, start: int, enough: int) -> None:
        self.start, self.enough = start, enough

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, self.start :].sum(1) > self.enough


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


@pytest.mark.parametrize("model_type", ["qwen2", "gpt_neox", "phi"])
def test_greedy_text_is_that_of_generate_on_other_architectures(model_type: str) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    alone, ours = both(made(model_type), prompts(PROMPT), **settings)
    assert ours.tolist() == alone.tolist()


def test_drafts_are_accepted(model: PreTrainedModel) -> None:
    """The equality above is not that of plain decoding in disguise: a right guess saves steps, processors or not."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.7}
    answer = model.generate(**prompts(PROMPT), **settings)[0, len(PROMPT) :].tolist()
    ours = model.generate(
        **prompts(PROMPT),
        **settings,
        custom_generate=precedent.generate,
        drafters=[OracleDrafter(answer)],
        return_dict_in_generate=True,
    )
    (counted,) = ours.speculation
    assert counted["num_steps"] <= 4
    assert counted["accepted_by_source"]["oracle"] >= NEW - 4


def test_stop_strings_go_in_as_a_criterion() -> None:
    tokenizer = byte_tokenizer()
    model = made(vocab_size=259, seed=8)
    inputs = prompts(tokenizer("order 17 order 18 order").input_ids)
    settings = {"max_new_tokens": 30, "do_sample": False}
    free = tokenizer.decode(model.generate(**inputs, **settings)[0, -30:])
    letter = next(letter for letter in free[5:] if letter.isascii())
    stop = StoppingCriteriaList([StopStringCriteria(tokenizer, [letter])])
    alone, ours = both(model, inputs, **settings, stopping_criteria=stop)
    assert ours.tolist() == alone.tolist()
    assert ours.shape[1] < inputs["input_ids"].shape[1] + 30


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
    """Every token is the choice of the seed's noise among the probabilities that transformers computes there."""
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
    ours = model.generate(**inputs, **settings, max_new_tokens=NEW, custom_generate=precedent.generate)[0].tolist()
    for place in range(NEW):
        given = torch.tensor([ours[: len(PROMPT) + place]])
        rows = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            **settings,
            max_new_tokens=1,
            output_scores=True,
            return_dict_in_generate=True,
        ).scores
        assert coupled_choice(rows[0][0].softmax(0), seed, place) == ours[len(PROMPT) + place]


def test_the_sampled_law_is_that_of_generate() -> None:
    """A chi-square over all texts of two tokens from a vocabulary of six, against their exact probabilities."""
    model = made(vocab_size=6, num_hidden_layers=1, scale=0.2)
    inputs, settings = prompts([1, 2, 3, 1, 2]), {"do_sample": True, "temperature": 0.8, "top_k": 4}
    expected = _distribution_of_two_tokens(model, inputs["input_ids"], settings)
    torch.manual_seed(3)
    drafters = [RandomDrafter(6, seed=2), "prompt"]
    drawn = model.generate(
        **inputs,
        **settings,
        max_new_tokens=2,
        num_return_sequences=500,
        custom_generate=precedent.generate,
        drafters=drafters,
    )
    counts = torch.zeros(6, 6, dtype=torch.float64)
    for first, second in drawn[:, -2:].tolist():
        counts[first, second] += 1
    assert counts[expected == 0].sum() == 0
    likely = expected * 500 >= 5
    observed = [*counts[likely].tolist(), float(counts[~likely].sum())]
    wanted = [*(expected[likely] * 500).tolist(), float(expected[~likely].sum() * 500)]
    assert (
        stats.chisquare(observed[: len(observed) - (wanted[-1] == 0)], wanted[: len(wanted) - (wanted[-1] == 0)])[1]
        > 1e-3
    )


def _distribution_of_two_tokens(model: PreTrainedModel, prompt: Tensor, settings: dict[str, Any]) -> Tensor:
    """P(first, second) by transformers' own processed rows, `[vocab_size, vocab_size]`."""

    def row(ids: Tensor) -> Tensor:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **settings,
            max_new_tokens=1,
            output_scores=True,
            return_dict_in_generate=True,
        )
        return out.scores[0][0].double().softmax(0)

    first = row(prompt)
    seconds = [row(torch.cat((prompt, torch.tensor([[token]])), 1)) for token in range(len(first))]
    return first[:, None] * torch.stack(seconds)


def test_a_seed_fixes_the_text_whatever_is_proposed(model: PreTrainedModel) -> None:
    texts = []
    for seed, drafters in ((1, ()), (1, [RandomDrafter(VOCABULARY)]), (2, ())):
        torch.manual_seed(seed)
        settings = {"do_sample": True, "max_new_tokens": NEW, "num_return_sequences": 2}
        ours = model.generate(**prompts(PROMPT), **settings, custom_generate=precedent.generate, drafters=drafters)
        texts.append(ours[:, len(PROMPT) :].tolist())
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


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


class Listener(BaseStreamer):
    """A streamer that notes everything, and breaks on demand."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.heard: list[Any] = []
        self.fails_after = fails_after

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())
        if len(self.heard) > self.fails_after:
            raise OSError("nobody listens")

    def end(self) -> None:
        self.heard.append("end")


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


@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_what_breaks_in_the_middle_leaves_the_next_call_as_it_was(model: PreTrainedModel, at: int) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**prompts(PROMPT), **settings)
    ended = Watched()
    with pytest.raises(KeyError, match="criterion"):
        model.generate(
            **prompts(PROMPT),
            **settings,
            custom_generate=precedent.generate,
            drafters=[ended],
            stopping_criteria=StoppingCriteriaList([Interrupting(at)]),
        )
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


class Counting(LogitsProcessor):
    """A processor that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class Noisy(LogitsProcessor):
    """A processor with coins of its own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class Lazy(LogitsProcessor):
    """A processor that sets itself up at its first call, as transformers' own sequence bias does."""

    ready = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.ready = True
        return scores


def test_a_processor_that_is_set_up_at_its_first_call_is_no_stateful_one(model: PreTrainedModel) -> None:
    settings = {"max_new_tokens": 4, "do_sample": False}
    alone, ours = both(model, prompts(PROMPT), **settings, logits_processor=LogitsProcessorList([Lazy()]))
    assert ours.tolist() == alone.tolist()


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 12), torch.zeros(1, 2, 3, 12), 0)
    return cache


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "beams": (lambda: {"num_beams": 2}, "^num_beams=2 asks for beam search"),
    "contrastive": (lambda: {"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 asks for contrastive search"),
    "dola": (lambda: {"dola_layers": "low"}, "dola_layers='low' asks for dola generation"),
    "prompt lookup": (lambda: {"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens=5 asks for assisted"),
    "mtp": (lambda: {"use_mtp": True}, "^use_mtp=True asks for assisted"),
    "assistant": (lambda: {"assistant_model": tiny_causal_lm(vocab_size=VOCABULARY)}, "assistant_model= is"),
    "attentions": (lambda: {"output_attentions": True}, "output_attentions=True"),
    "hidden states": (lambda: {"output_hidden_states": True}, "output_hidden_states=True"),
    "cache": (lambda: {"past_key_values": filled_cache()}, "past_key_values="),
    "static cache": (lambda: {"cache_implementation": "static"}, "cache_implementation='static'"),
    "no cache": (lambda: {"use_cache": False}, "use_cache=False"),
    "guidance": (lambda: {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
    "synthid": (
        lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
        "SynthIDTextWatermarkLogitsProcessor keeps state",
    ),
    "counting": (lambda: {"logits_processor": LogitsProcessorList([Counting()])}, "Counting gives different results"),
    "noisy": (lambda: {"logits_processor": LogitsProcessorList([Noisy()])}, "Noisy gives different results"),
    "holes": (lambda: {"attention_mask": torch.tensor([[1] * 4 + [0] + [1] * 5])}, "attention_mask= hides more"),
    "positions": (lambda: {"position_ids": torch.arange(3, 13)[None]}, "position_ids= other than"),
    "synced": (lambda: {"synced_gpus": True}, "synced_gpus=True"),
    "labels": (lambda: {"inputs_embeds": torch.zeros(1, 10, 48, dtype=torch.float64)}, "inputs_embeds= is not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(model: PreTrainedModel, name: str) -> None:
    settings, says = REFUSED[name]
    arguments = {**prompts(PROMPT), "max_new_tokens": 4, "do_sample": False, **settings()}
    with pytest.raises(UnsupportedError, match=says):
        model.generate(**arguments, custom_generate=precedent.generate)


def test_several_prompts_are_refused_where_generate_would_couple_them(model: PreTrainedModel) -> None:
    two = prompts(PROMPT, PROMPT)
    with pytest.raises(UnsupportedError, match="streamer= with several prompts"):
        model.generate(**two, max_new_tokens=4, custom_generate=precedent.generate, streamer=Listener())
    with pytest.raises(UnsupportedError, match="but no end token"):
        model.generate(**two, max_new_tokens=4, max_time=60.0, custom_generate=precedent.generate)


def test_a_model_in_training_mode_is_refused() -> None:
    model = made()
    model.train()
    with pytest.raises(UnsupportedError, match="training mode"):
        model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate)
    assert model.training


def test_rows_that_mask_everything_name_the_position(model: PreTrainedModel) -> None:
    banned = {"suppress_tokens": list(range(VOCABULARY))}
    with pytest.raises(GenerationError, match="output position 0"):
        model.generate(**prompts(PROMPT), **banned, max_new_tokens=4, custom_generate=precedent.generate)


def test_the_users_model_stays_as_it_was() -> None:
    """Modules, classes, configuration and weights: a bfloat16 model, whose linear layers are packed for our loop."""
    model = tiny_causal_lm(vocab_size=VOCABULARY, dtype=torch.bfloat16)
    before = [(name, type(module), dict(vars(module))) for name, module in model.named_modules()]
    weights = {name: (id(tensor), tensor._version, tensor.clone()) for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate)
    for name, module in model.named_modules():
        assert (name, type(module), dict(vars(module))) == before.pop(0)
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name][2])
    ours = prepared_for(model).target.model
    assert ours is not model
    assert ours.get_output_embeddings().weight is model.get_output_embeddings().weight


def test_a_second_call_pays_no_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made_targets = _count_targets(monkeypatch)
    model = tiny_causal_lm(vocab_size=VOCABULARY)
    for _ in range(3):
        model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate)
        model.generate(**prompts(PROMPT), max_new_tokens=4)
    assert len(made_targets) == 1


def _count_targets(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    built: list[PreTrainedModel] = []

    def noted(model: PreTrainedModel) -> TargetModel:
        built.append(model)
        return TargetModel(model)

    monkeypatch.setattr(prepared, "TargetModel", noted)
    return built


def change_a_weight(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight[:, :8].neg_()


def replace_a_module(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = nn.Identity()


def load_other_weights(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny_causal_lm(vocab_size=VOCABULARY, num_hidden_layers=2, seed=77).state_dict())


@pytest.mark.parametrize("change", [change_a_weight, replace_a_module, load_other_weights])
def test_a_model_that_was_changed_is_set_up_anew(change: Callable[[PreTrainedModel], None]) -> None:
    """float32, where the packed copies of the old weights would still be at hand."""
    model, settings = made(dtype=torch.float32), {"max_new_tokens": 8, "do_sample": False}
    before = model.generate(**prompts(PROMPT), **settings, custom_generate=precedent.generate).tolist()
    change(model)
    alone, ours = both(model, prompts(PROMPT), **settings)
    assert ours.tolist() == alone.tolist() != before


class Switched(nn.Linear):
    """A layer with a switch, as adapters have one."""

    off = False

    def forward(self, input: Tensor) -> Tensor:
        return torch.zeros_like(input) if self.off else super().forward(input)


def test_an_adapter_that_is_switched_off_is_off() -> None:
    model, settings = made(), {"max_new_tokens": 8, "do_sample": False}
    layer = Switched(48, 48, dtype=torch.float64)
    model.model.layers[0].self_attn.o_proj = layer
    for off in (False, True):
        layer.off = off
        alone, ours = both(model, prompts(PROMPT), **settings)
        assert ours.tolist() == alone.tolist()


def test_what_was_set_up_goes_with_the_model() -> None:
    model = made()
    model.generate(**prompts(PROMPT), max_new_tokens=2, custom_generate=precedent.generate)
    kept = weakref.ref(prepared_for(model).target)
    del model
    gc.collect()
    assert kept() is None


@pytest.mark.usefixtures("searches_at_once")
def test_a_cache_recalls_what_it_stored_for_its_tenant_alone() -> None:
    tokenizer, model = byte_tokenizer(), made(vocab_size=259, seed=8)
    inputs = prompts(tokenizer("look up order 17").input_ids)
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:

        def recalled(tenant: str) -> tuple[list[list[int]], int]:
            ours = model.generate(
                **inputs,
                max_new_tokens=40,
                do_sample=False,
                custom_generate=precedent.generate,
                speculation_cache=cache,
                speculation_tokenizer=tokenizer,
                tenant=tenant,
                return_dict_in_generate=True,
            )
            return ours.sequences.tolist(), ours.speculation[0]["accepted_by_source"].get("recall", 0)

        cold, warm, other = recalled("shop"), recalled("shop"), recalled("bank")
        stored = cache.list(tenant="shop")
    assert cold[0] == warm[0] == other[0]
    assert warm[1] > 20
    assert cold[1] == other[1] == 0
    assert [one.token_ids for one in stored] == [tuple(cold[0][0][len(inputs["input_ids"][0]) :])]
    assert "order 17" in stored[0].query


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"drafters": ["recall"]}, "drafter 'recall' has nothing to draft from here: give speculation_cache"),
        ({"drafters": ["draft-model"]}, "DraftModelDrafter"),
        ({"drafters": ["promt"]}, "did you mean 'prompt'"),
        ({"drafters": "prompt"}, "give a list"),
        ({"speculation_cache": SpeculationCache.open(None, embedder=HashEmbedder())}, "needs speculation_tokenizer="),
    ],
)
def test_wrong_settings_say_what_to_write(model: PreTrainedModel, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        model.generate(**prompts(PROMPT), max_new_tokens=4, custom_generate=precedent.generate, **settings)


def test_calls_from_several_threads_do_not_meet(model: PreTrainedModel) -> None:
    """One model, one planner, one drafter: eight calls at once, each with the answer that it has alone."""
    rows, settings = [[*PROMPT, 20 + number] for number in range(8)], {"max_new_tokens": NEW, "do_sample": False}

    def ours(row: Sequence[int]) -> list[list[int]]:
        return model.generate(**prompts(row), **settings, custom_generate=precedent.generate).tolist()

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(ours, rows))
    assert together == [model.generate(**prompts(row), **settings).tolist() for row in rows]


def test_a_model_loaded_in_inference_mode_works() -> None:
    """Such weights carry no version number."""
    with torch.inference_mode():
        config = tiny_causal_lm(vocab_size=VOCABULARY, num_hidden_layers=1).config
        model = AutoModelForCausalLM.from_config(config).eval()
    settings = {"max_new_tokens": 4, "do_sample": False}
    alone, ours = both(model, prompts(PROMPT), **settings)
    assert ours.tolist() == alone.tolist()
