"""Token ids of every kind of target in each mode, and the drafter that each token came from.

Every way of drafting must give the token ids of plain decoding; sources and counts freeze drafting and planning too.
Nothing depends on a clock: searches run on the thread that asks for them, and by the cost curve a forward pass takes so
long that the measured time of a draw does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from precedent import Engine, SamplingParams, SpeculationCache, SpeculationConfig
from precedent.engine import EngineOptions, GenerationResult
from precedent.grammar import Regex
from precedent.runtime.background import AtOnce
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import fixed_cost
from precedent_testing.sweep import tiny_model
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm, tiny_seq2seq_lm

WINDOW = {"sliding_window": 16}
EVERY_OTHER = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}

SLOW = (
    *("attention-sinks", "hybrid-delta-rule", "hybrid-mamba"),
    *("sliding-and-full", "encoder-decoder-with-relative-positions"),
)
"""Those that take long, or of whose kind there is another; they run with the exhaustive tests."""

TARGETS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_causal_lm("llama", seed=21),
    "sliding-window": lambda: tiny_causal_lm("mistral", seed=2, **WINDOW),
    "sliding-and-full": lambda: tiny_causal_lm(
        "qwen2", seed=3, use_sliding_window=True, max_window_layers=1, **EVERY_OTHER
    ),
    "attention-sinks": lambda: tiny_causal_lm("gpt_oss", seed=3, **EXPERTS, **EVERY_OTHER),
    "hybrid-delta-rule": lambda: tiny_model("qwen3_next"),
    "hybrid-mamba": lambda: tiny_model("jamba"),
    "single-path": lambda: tiny_causal_lm("bloom", seed=3, tie_word_embeddings=False),
    "encoder-decoder": lambda: tiny_seq2seq_lm("bart", seed=2),
    "encoder-decoder-with-relative-positions": lambda: tiny_seq2seq_lm("t5", seed=4),
}
"""Random models in float64, the same ones each time; seeds under which answers do not repeat a single token."""

WITH_FIRST_LAYERS = ("llama", "sliding-window", "sliding-and-full", "attention-sinks", "hybrid-delta-rule")

PROMPT = tuple(b"look up order 17, then order 18, then order 19")
NEAR = tuple(b"look up order 17, then order 18, then order 20")
QUERY = "look up three orders"
NUM_TOKENS = 24

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS),
    "coupled": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_k=40, seed=5),
}

ORDERS = Regex(r"(order [0-9]{2} is (open|sent); ){1,3}")
TEMPLATES = ("order {number} is open; ", "order {number} is sent; ")

PLAIN = SpeculationConfig(enabled=False, write_back=False)
UNDRAFTED = SpeculationConfig(drafters=())


def slow_forwards() -> Any:
    """Return a nearly flat cost curve whose times are far longer than any measured draw."""
    curve = type(fixed_cost()).through({1: 1e9, 257: 1.5e9})
    curve.load = 1e-6  # measured draws are divided by it: none seems cheap enough to be made only to measure it
    return curve


def draft_for(name: str) -> PreTrainedModel:
    """Return a draft model that is often right: the target itself, or a Llama, with a little noise in its weights."""
    draft = TARGETS["llama" if name.startswith("encoder-decoder") else name]()
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype))
    return draft


@contextmanager
def engine_of(target: PreTrainedModel, **options: Any) -> Iterator[Engine]:
    """An engine whose cache holds the answers of four earlier requests."""
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        options["cache"] = cache
        given = {"name": "golden", "cost": slow_forwards(), "executor": AtOnce()}
        engine = Engine(target, byte_tokenizer(), EngineOptions(**options), **given)
        with closing(engine):
            greedy, coupled = (replace(each, max_tokens=NUM_TOKENS * 3 // 4) for each in SAMPLINGS.values())
            for prompt, sampling, more in (
                (NEAR, greedy, {}),
                (PROMPT, greedy, {}),
                (PROMPT, coupled, {}),
                (NEAR, coupled, {"grammar": ORDERS}),
            ):
                engine.submit(prompt, sampling, speculation=UNDRAFTED, query=QUERY, **more).result()
            yield engine


def drafted(engine: Engine, sampling: SamplingParams, drafters: Sequence[str] = (), **request: Any) -> GenerationResult:
    """Answer with these drafters (none: all that the engine has), without adding to the cache."""
    named = {"drafters": tuple(drafters)} if drafters else {}
    speculation = SpeculationConfig(write_back=False, **named)
    return engine.submit(PROMPT, sampling, speculation=speculation, query=QUERY, **request).result()


def with_an_error(token_ids: Sequence[int]) -> list[int]:
    """Turn an answer into a prediction: replace one token, and insert another."""
    return [*token_ids[:7], 65, *token_ids[8:16], 66, *token_ids[16:]]


def answer_of(result: GenerationResult) -> dict[str, Any]:
    """The part of a result that does not depend on drafting."""
    return {
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
    }


def drafting_of(result: GenerationResult) -> dict[str, Any]:
    """The sources of the tokens in order, with repetitions counted, and the numbers of steps and draft tokens."""
    stats = result.stats
    runs = [(source, len(list(tokens))) for source, tokens in groupby(result.sources)]
    return {
        "sources": " ".join(source if count == 1 else f"{source}×{count}" for source, count in runs),
        "steps": stats.num_steps,
        "steps_with_drafts": stats.num_drafts,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "drafted_by_source": dict(sorted(stats.drafted_by_source.items())),
        "accepted_by_source": dict(sorted(stats.accepted_by_source.items())),
        "cached_prompt_tokens": result.cached_prompt_tokens,
    }


class Recording:
    """Plain answers in one mode, and the drafting statistics of each way to get the same answers."""

    def __init__(self, engine: Engine, mode: str) -> None:
        self.sampling = SAMPLINGS[mode]
        self.free = engine.submit(PROMPT, self.sampling, speculation=PLAIN).result()
        self.formed = engine.submit(PROMPT, self.sampling, speculation=PLAIN, grammar=ORDERS).result()
        self.mode, self.drafting = self.free.stats.mode, dict[str, Any]()

    def draft(self, name: str, engine: Engine, drafters: Sequence[str] = (), **request: Any) -> None:
        result = drafted(engine, self.sampling, drafters, **request)
        plain = self.formed if "grammar" in request else self.free
        assert (result.token_ids, result.finish_reason) == (plain.token_ids, plain.finish_reason), name
        assert result.stats.mode == self.mode
        self.drafting[name] = drafting_of(result)

    def without_a_model(self, engine: Engine) -> None:
        self.draft("recall", engine, ["recall"])
        self.draft("prompt", engine, ["prompt"])
        self.draft("prediction", engine, ["prediction"], prediction=with_an_error(self.free.token_ids))
        self.draft("template", engine, ["template"], templates=TEMPLATES, grammar=ORDERS)
        self.draft("grammar", engine, ["grammar"], grammar=ORDERS)

    def with_a_draft_model(self, engine: Engine) -> None:
        prediction = with_an_error(self.free.token_ids)
        self.draft("draft-model", engine, ["draft-model"])
        self.draft("together", engine, prediction=prediction)
        self.draft("together, with a grammar", engine, prediction=prediction, templates=TEMPLATES, grammar=ORDERS)

    def as_dict(self) -> dict[str, Any]:
        formed = {"text": self.formed.text, **answer_of(self.formed)}
        return {
            "mode": self.mode,
            "answer": answer_of(self.free),
            "answer with a grammar": formed,
            "drafting": self.drafting,
        }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in SLOW else name for name in TARGETS]
)
def test_what_is_decoded_and_drafted_is_as_recorded(name: str, golden: Callable[[str, Any], None]) -> None:
    with engine_of(TARGETS[name]()) as engine:
        recordings = {mode: Recording(engine, mode) for mode in SAMPLINGS}
        for recording in recordings.values():
            recording.without_a_model(engine)
    with engine_of(TARGETS[name](), draft_model=draft_for(name)) as engine:
        for recording in recordings.values():
            recording.with_a_draft_model(engine)
    if name in WITH_FIRST_LAYERS:
        with engine_of(TARGETS[name](), draft_model="first-layers:1") as engine:
            for recording in recordings.values():
                recording.draft("first-layers:1", engine, ["draft-model"])
    golden(f"decoding/{name}", {mode: recording.as_dict() for mode, recording in recordings.items()})
