"""The contract of every engine that drafts with a head: plain answers, reserved memory, and clear refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conditioned import opinionated_weights, random_conditioned
from helpers.hybrids import random_ids
from helpers.mtp_checkpoints import checkpoint, loaded
from helpers.packages import graph_settings
from helpers.published_heads import (
    COVERED,
    DFLASH,
    SPECFORGE,
    ZLAB,
    block_weights,
    random_weights,
    small_target,
    write_head,
)
from helpers.random_weights import quantise_randomly
from helpers.small_engines import PLAIN, PROMPT, AlwaysOpen
from helpers.tiny_block import tiny_block_draft

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.drafters import DrafterParts, kind_of, load_draft
from precedent.engine.engine import Engine
from precedent.errors import CapacityError, UnsupportedError
from precedent.grammar import JsonSchema
from precedent.planning.costs import CostCurve
from precedent.runtime.background import Background
from precedent.target import TargetModel
from precedent_drafts.kinds import MTP_HEADS
from precedent_drafts.trained import TOKEN_GUIDED
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


@dataclass(frozen=True)
class Head:
    """A kind of head: its drafter, its target, and the draft beside that target, which may need a folder.

    The target keeps `per_token` numbers of each token, or else `hidden_size`. The head's own KV cache holds at most
    `context` tokens of a prompt, and `step` tokens behind the answer.
    """

    drafter: str
    model: Callable[[Path], Any]
    draft: Callable[[Any, Path], Any] = lambda model, folder: None
    per_token: int | None = None
    context: int = 10**6
    step: int = SpeculationConfig().max_nodes + SpeculationConfig().max_draws

    @property
    def names(self) -> tuple[str, ...]:
        """Drafters of an engine that uses this head: where no draft is given, it has to be named."""
        return (*SpeculationConfig().drafters, "mtp") if self.drafter == "mtp" else SpeculationConfig().drafters

    @property
    def alone(self) -> SpeculationConfig:
        return SpeculationConfig(drafters=(self.drafter,))


def mtp(family: str) -> Head:
    return Head("mtp", lambda folder: loaded(checkpoint(folder / family, family)))


def conditioned(model: Any, folder: Path) -> Any:
    weights = opinionated_weights(model, 2, TOKEN_GUIDED, range(259))
    return random_conditioned(model, (2,), TOKEN_GUIDED, weights)


def block(draft: Callable[[Any, Path], Any], per_token: int = 2 * 48, context: int = 24) -> Head:
    return Head("block-draft", lambda folder: tiny_causal_lm(scale=1.5), draft, per_token, context, step=5)


HEADS: dict[str, Head] = {
    "EAGLE-3": Head(
        "eagle",
        lambda folder: small_target(),
        lambda model, folder: write_head(folder / "head", SPECFORGE, random_weights(SPECFORGE)),
        per_token=3 * 48,
    ),
    "MTP like Qwen": mtp("qwen3_next"),
    "MTP like DeepSeek": mtp("glm4_moe"),
    "conditioned": Head("draft-model", lambda folder: tiny_causal_lm(scale=2.0), conditioned),
    "block": block(lambda model, folder: tiny_block_draft(model)),
    "block without condition": block(lambda model, folder: tiny_block_draft(model, condition="none"), per_token=0),
    "DFlash": block(lambda model, folder: write_head(folder, DFLASH, block_weights(DFLASH, COVERED)), context=10**6),
}
EACH = pytest.mark.parametrize("name", HEADS)
QWEN = pytest.param("MTP like Qwen", marks=pytest.mark.exhaustive)

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=12),
    "seeded": SamplingParams(temperature=0.9, seed=7, max_tokens=12),
}
SCHEMA = JsonSchema.of({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


def engine_on(head: Head, folder: Path, model: Any = None, draft: Any = None, **settings: Any) -> Engine:
    """An engine for which width is free; it draws in every step, whether it pays or not."""
    model = head.model(folder) if model is None else model
    draft = head.draft(model, folder) if draft is None else draft
    given = {"speculation": SpeculationConfig(drafters=head.names), "draft_model": draft} | settings
    engine = Engine.load(model, tokenizer=byte_tokenizer(), **given)
    planner: Any = engine.planner
    planner.cost = CostCurve()
    planner.gates.update({name: AlwaysOpen() for name in (head.drafter, "draft-model")})
    return engine


SLOW = {"MTP of DeepSeek-V3": mtp("deepseek_v3")}


@pytest.fixture(scope="module", params=[*HEADS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Head, Engine]]:
    head = (HEADS | SLOW)[request.param]
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = engine_on(head, tmp_path_factory.mktemp("head"), cache=cache)
        yield head, engine
        engine.close()


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize("beside", [(), ("recall", "prompt")])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.sampled(5)
def test_answers_are_those_of_plain_decoding(
    made: tuple[Head, Engine], beside: tuple[str, ...], sampling: SamplingParams
) -> None:
    """Greedy and seeded, alone and beside other drafters, for concurrent requests of ragged lengths, twice."""
    head, engine = made
    prompts = [PROMPT, PROMPT[:9], PROMPT[:1], random_ids(1, 70)]
    expected = [engine.submit(prompt, sampling, speculation=PLAIN).result().token_ids for prompt in prompts]
    speculation = SpeculationConfig(drafters=(*beside, head.drafter))
    for _ in range(2):
        asked = [engine.submit(prompt, sampling, speculation=speculation, query="order") for prompt in prompts]
        assert [each.result().token_ids for each in asked] == expected
    alone = engine.submit(PROMPT, sampling, speculation=head.alone).result()
    assert alone.token_ids == expected[0]
    assert alone.stats.drafted_by_source[head.drafter] > 0


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_on_cuda_answers_are_those_of_plain_decoding(name: str, sampling: SamplingParams, tmp_path: Path) -> None:
    """Concurrent requests of ragged lengths, twice."""
    head = HEADS[name]
    prompts = [PROMPT, PROMPT[:9], PROMPT[:1], random_ids(1, 70)]
    with closing(engine_on(head, tmp_path, head.model(tmp_path).to("cuda"))) as engine:
        expected = [engine.submit(prompt, sampling, speculation=PLAIN).result().token_ids for prompt in prompts]
        for _ in range(2):
            asked = [engine.submit(prompt, sampling, speculation=head.alone) for prompt in prompts]
            results = [each.result() for each in asked]
            assert [each.token_ids for each in results] == expected
            assert all(each.stats.drafted_by_source[head.drafter] > 0 for each in results)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.sampled(3)
def test_grammars_hold(made: tuple[Head, Engine], temperature: float) -> None:
    """What the grammar forbids is not answered, also where no covered token is left."""
    head, engine = made
    sampling = SamplingParams(max_tokens=30, temperature=temperature)
    plain, drafted = (
        engine.submit(PROMPT, sampling, grammar=SCHEMA, speculation=each).result()
        for each in (PLAIN, SpeculationConfig(drafters=("grammar", head.drafter)))
    )
    assert len(drafted.token_ids) > 5
    if not temperature:
        assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("name", ["EAGLE-3", "MTP like Qwen", "MTP like DeepSeek", "block"])
@pytest.mark.sampled(2)
def test_the_next_turn_and_kept_prefixes_answer_the_same(name: str, tmp_path: Path) -> None:
    """What is read comes back with the keys and values, from idle conversations and from disk."""
    head, prompt, sampling = HEADS[name], [*random_ids(5, 100), *PROMPT], SamplingParams(max_tokens=12)
    answers: list[Any] = []
    for _ in range(2):
        with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
            engine = engine_on(head, tmp_path, cache=cache, keep_prefixes=True)
            first = engine.submit(prompt, sampling, prefix_tokens=100).result()
            turn = [*prompt, *first.token_ids, *b" and then?"]
            second = engine.submit(turn, sampling, speculation=head.alone).result()
            plain = engine.submit(turn, sampling, speculation=PLAIN).result()
            engine.close()
        assert second.cached_prompt_tokens >= len(prompt)
        assert second.token_ids == plain.token_ids
        assert second.stats.drafted_by_source[head.drafter] > 0
        answers.append((first.token_ids, second.token_ids, first.cached_prompt_tokens))
    (*kept, cached), (*again, cached_again) = answers
    assert kept == again
    assert (cached, cached_again) == (0, 100)


@EACH
@pytest.mark.sampled(2)
def test_memory_covers_what_is_read_and_the_heads_own_cache(name: str, tmp_path: Path) -> None:
    """What a request reserves covers what it holds, and no more; one that drafts otherwise reserves nothing for it."""
    head = HEADS[name]
    model = head.model(tmp_path)
    target, plain = TargetModel(model), TargetModel(head.model(tmp_path))
    draft = head.draft(model, tmp_path)
    loaded_draft = None if draft is None else load_draft(draft, model, byte_tokenizer())
    kind = MTP_HEADS if loaded_draft is None else kind_of(loaded_draft)
    assert kind is not None
    prepared: Any = kind.beside(target, loaded_draft)
    per_token = target.model.config.hidden_size if head.per_token is None else head.per_token
    assert target.kv_bytes(300) - plain.kv_bytes(300) == 512 * per_token * 8
    executor = Background(1, "test")
    drafter: Any = kind.drafter(DrafterParts("", executor, heads={kind.name: prepared}))
    executor.shutdown()
    slot = (prepared if head.drafter != "block-draft" else TargetModel(loaded_draft)).new_slot()
    slot.kv.reserve(min(200, head.context) + 50 + head.step)
    reserved = drafter.request_bytes(200, 50, SpeculationConfig())
    assert reserved == slot.kv.nbytes > 0
    rows = SpeculationConfig().max_nodes + SpeculationConfig().max_draws + 1
    limit = EngineLimits(max_kv_bytes=target.request_bytes(200, 50, rows, rows) + reserved - 1)
    engine = engine_on(head, tmp_path, model, limits=limit)
    with pytest.raises(CapacityError, match="max_kv_bytes"):
        engine.submit(random_ids(1, 200), SamplingParams(max_tokens=50))
    without = SpeculationConfig(drafters=("prompt",))
    engine.submit(random_ids(1, 200), SamplingParams(max_tokens=50), speculation=without).cancel()
    engine.close()


@pytest.mark.parametrize("name", ["EAGLE-3", "conditioned", "block"])
def test_a_target_that_keeps_no_states_is_refused(name: str, tmp_path: Path) -> None:
    """Forwards of fixed size have no place for them."""
    head = HEADS[name]
    model = head.model(tmp_path)
    target = TargetModel(model, cuda_graphs=graph_settings(arena_tokens=1024, capture=False))
    draft = load_draft(head.draft(model, tmp_path), model, byte_tokenizer())
    kind: Any = kind_of(draft)
    with pytest.raises(UnsupportedError, match=r"forwards of fixed size .*bitwise=True on a GPU.* keep no hidden"):
        kind.beside(target, draft)


@pytest.mark.parametrize("name", ["EAGLE-3", "MTP like DeepSeek", "conditioned", "block", QWEN])
@torch.no_grad()
def test_a_head_that_knows_its_target_saves_steps(name: str, tmp_path: Path) -> None:
    """Both find all tokens equally likely, so each says the lowest one for ever."""
    head = HEADS[name]
    model = head.model(tmp_path)
    model.get_output_embeddings().weight.zero_()
    draft = head.draft(model, tmp_path)
    if name == "EAGLE-3":
        weights = random_weights(SPECFORGE)
        draft = write_head(tmp_path, SPECFORGE, weights | {"lm_head.weight": weights["lm_head.weight"] * 0.0})
    elif name == "block":
        draft.markov.left.fill_(1.0)
        draft.markov.right.copy_(5.0 * (torch.arange(draft.markov.right.shape[1]) == 0))
    engine = engine_on(head, tmp_path, model, draft)
    stats = engine.submit(PROMPT, SamplingParams(max_tokens=40), speculation=head.alone).result().stats
    engine.close()
    assert stats.tokens_per_step > 4
    assert stats.accepted_by_source[head.drafter] >= 3 * stats.num_steps


@pytest.mark.sampled(3)
def test_a_cancelled_request_leaves_the_next_one_as_it_was(made: tuple[Head, Engine]) -> None:
    """In the middle of its answer, while another one runs."""
    head, engine = made
    sampling = SamplingParams(max_tokens=60)
    expected = engine.submit(PROMPT[:20], sampling, speculation=PLAIN).result().token_ids
    cancelled, kept = (engine.submit(prompt, sampling, speculation=head.alone) for prompt in (PROMPT, PROMPT[:20]))
    next(iter(cancelled))
    cancelled.cancel()
    assert kept.result().token_ids == expected


@pytest.mark.parametrize(
    ("config", "weights"),
    [(SPECFORGE, random_weights(SPECFORGE)), (ZLAB, block_weights(ZLAB)), (DFLASH, block_weights(DFLASH, COVERED))],
    ids=["EAGLE", "whole head", "some rows of it"],
)
def test_published_drafts_draft_beside_a_quantised_target(config: Any, weights: Any, tmp_path: Path) -> None:
    texts = []
    for draft in (None, write_head(tmp_path, config, weights)):
        dense = tiny_causal_lm(dtype=torch.float32, scale=1.5, num_hidden_layers=4)
        target = quantise_randomly(dense, ["groups of 16 with minima"])
        with closing(Engine(target, byte_tokenizer(), name="tiny", cost=CostCurve(), draft_model=draft)) as engine:
            for name in ("eagle", "block-draft"):
                engine.planner.gates[name] = AlwaysOpen()
            result = engine.submit(PROMPT, SamplingParams(max_tokens=12)).result()
            texts.append(result.token_ids)
    assert texts[0] == texts[1]
    assert sum(result.stats.drafted_by_source[name] for name in ("eagle", "block-draft")) > 0
