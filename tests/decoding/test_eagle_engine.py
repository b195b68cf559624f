"""Engines that draft with a published EAGLE-3 head: plain answers in fewer steps, or a clear refusal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draft_head_engines import SAMPLINGS, AlwaysOpen, check_answers, check_grammar, check_next_turns
from helpers.hybrids import random_ids
from helpers.packages import graph_settings
from helpers.published_heads import FORMS, SPECFORGE, random_weights, small_target, states_kept_by, write_head
from helpers.small_engines import PLAIN, PROMPT

from precedent.cache import SpeculationCache
from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import CapacityError, ConfigError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.target.eagle.head import load_eagle
from precedent.target.eagle.model import eagle_beside
from precedent.target.encoder_decoder.target import EncoderDecoderTarget
from precedent.target.load.loading import load_draft
from precedent.target.published import published_draft
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm, tiny_seq2seq_lm

EAGLE = SpeculationConfig(drafters=("eagle",))


def engine_on(draft: Any, model: Any = None, **settings: Any) -> Engine:
    """An engine for which width is free; it draws in every step, whether it pays or not."""
    model = small_target() if model is None else model
    engine = Engine.load(model, tokenizer=byte_tokenizer(), draft_model=draft, **settings)
    planner: Any = engine.planner
    planner.cost = CostCurve()
    planner._gates.update({name: AlwaysOpen() for name in ("eagle", "mtp")})
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("eagle") / "head", SPECFORGE, random_weights(SPECFORGE))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with SpeculationCache.open(None, embedder=HashEmbedder()) as cache:
        engine = engine_on(folder, cache=cache)
        yield engine
        engine.close()


@pytest.mark.usefixtures("searches_at_once")
@pytest.mark.parametrize("names", [("eagle",), ("recall", "prompt", "eagle")])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_answers_are_those_of_plain_decoding(engine: Engine, names: tuple[str, ...], sampling: SamplingParams) -> None:
    """Greedy and seeded, alone and beside other drafters, for concurrent requests of ragged lengths."""
    check_answers(engine, "eagle", names, sampling)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_grammars_hold(engine: Engine, temperature: float) -> None:
    """What the grammar forbids is neither drafted nor answered, also where no covered token is left."""
    check_grammar(engine, "eagle", temperature)


def test_a_cancelled_request_leaves_the_next_one_as_it_was(engine: Engine) -> None:
    """In the middle of its answer, while another one runs."""
    sampling = SamplingParams(max_tokens=200)
    expected = engine.submit(PROMPT[:20], sampling, speculation=PLAIN).result().token_ids
    cancelled, kept = (engine.submit(prompt, sampling, speculation=EAGLE) for prompt in (PROMPT, PROMPT[:20]))
    next(iter(cancelled))
    cancelled.cancel()
    assert kept.result().token_ids == expected


def test_the_next_turn_and_kept_prefixes_answer_the_same(folder: Path, tmp_path: Path) -> None:
    """Outputs of layers come back with the keys and values, from idle conversations and from disk."""
    check_next_turns(partial(engine_on, folder), tmp_path, EAGLE)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_that_knows_its_target_saves_steps(tmp_path: Path, temperature: float) -> None:
    """A target that only looks at its last token, and a head that computes the same from that token.

    Each key is the same but for its position, so a row attends to itself alone; what it reads there is its own normed
    embedding, which the target's head reads as well, and its states are normed to nothing.
    """
    sizes = {"num_key_value_heads": 4, "draft_vocab_size": 259}
    config = SPECFORGE | {"attention_bias": True, "norm_before_residual": True} | sizes
    model = small_target()
    engine = engine_on(write_head(tmp_path, config, knowing(model)), model)
    sampling = SamplingParams(
        temperature=temperature, max_tokens=40, logit_bias={engine.tokenizer.eos_token_id: -100.0}
    )
    result = engine.submit(PROMPT, sampling, speculation=EAGLE).result()
    engine.close()
    assert result.stats.tokens_per_step > 4
    assert result.stats.accepted_by_source["eagle"] >= 3 * result.stats.num_steps


@torch.no_grad()
def knowing(model: Any) -> dict[str, torch.Tensor]:
    """Lets a target look at its last token alone, and returns a head that knows what it says."""
    for layer in model.base_model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    zero, same = torch.zeros(48, 96, dtype=torch.float64), torch.full((48,), 30.0, dtype=torch.float64)
    weights = random_weights(SPECFORGE, range(259)) | {
        "midlayer.hidden_norm.weight": torch.zeros(48, dtype=torch.float64),
        "lm_head.weight": model.get_output_embeddings().weight.clone(),
        "norm.weight": model.base_model.norm.weight.clone(),
        "midlayer.input_layernorm.weight": torch.ones(48, dtype=torch.float64),
        "midlayer.self_attn.v_proj.weight": torch.eye(48, 96, dtype=torch.float64),
        "midlayer.self_attn.o_proj.weight": torch.eye(48, dtype=torch.float64),
        "midlayer.mlp.down_proj.weight": torch.zeros(48, 40, dtype=torch.float64),
    }
    weights |= {f"midlayer.self_attn.{name}_proj.weight": zero.clone() for name in ("q", "k")}
    biases = {"q": same, "k": same, "v": zero[:, 0], "o": zero[:, 0]}
    return weights | {f"midlayer.self_attn.{name}_proj.bias": bias.clone() for name, bias in biases.items()}


def test_memory_covers_the_layers_read_and_the_heads_own_cache(folder: Path) -> None:
    """What a request reserves covers what it holds; one that drafts otherwise reserves nothing for the head."""
    engine = engine_on(folder)
    target, head, plain = engine.target, engine._models.eagle, TargetModel(small_target())
    assert head is not None
    assert states_kept_by(target) == 3 * 48
    assert target.kv_bytes(300) - plain.kv_bytes(300) == 512 * 3 * 48 * 8
    with_head, without = (
        engine._kv_bytes(200, 50, EAGLE, engine._drafters_named((name,))) for name in ("eagle", "prompt")
    )
    slot = head.new_slot()
    slot.kv.reserve(250 + EAGLE.max_nodes + EAGLE.max_draws)
    assert with_head - without == slot.kv.nbytes > 0
    engine.close()
    engine = engine_on(folder, limits=EngineLimits(max_kv_bytes=with_head - 1))
    with pytest.raises(CapacityError, match="max_kv_bytes"):
        engine.submit(random_ids(1, 200), SamplingParams(max_tokens=50))
    engine.close()


def test_nothing_is_kept_where_eagle_is_not_named(folder: Path) -> None:
    """An engine that drafts otherwise keeps no outputs of layers, and none draws from a plain draft model as a head."""
    engine = engine_on(folder, speculation=SpeculationConfig(drafters=("prompt",)))
    assert engine.target.runner.outputs is None
    assert engine._models.eagle is None
    engine.close()
    engine = engine_on(tiny_causal_lm())
    assert "eagle" not in engine.drafters
    engine.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_in_every_format_is_a_draft_model(form: str, tmp_path: Path) -> None:
    """By the name of its folder, in safetensors and in torch's own format; and as an object."""
    folder = write_head(tmp_path, FORMS[form], random_weights(FORMS[form]), older=form == "SafeAILab")
    model = small_target()
    engine = engine_on(folder, model)
    result = engine.submit(PROMPT, SamplingParams(max_tokens=8)).result()
    engine.close()
    assert result.stats.drafted_by_source["eagle"] > 0
    head = load_draft(folder, model, byte_tokenizer())
    assert load_draft(head, model, byte_tokenizer()) is head


def test_what_cannot_give_states_is_refused(folder: Path) -> None:
    """Drawing ahead, another device, forwards of fixed size, encoders beside decoders."""
    model = small_target()
    with pytest.raises(ConfigError, match=r"an EAGLE head reads the target's states between two steps.*pearl=False"):
        engine_on(folder, pearl=True)
    with pytest.raises(ConfigError, match=r"runs beside its target, on cpu: leave out draft_device"):
        load_draft(folder, model, byte_tokenizer(), device="meta")
    draft = published_draft(folder)
    assert draft is not None
    head = load_eagle(draft, model)
    with pytest.raises(UnsupportedError, match=r"forwards of fixed size .*bitwise=True on a GPU.* eagle"):
        eagle_beside(head, TargetModel(model, cuda_graphs=graph_settings(arena_tokens=1024, capture=False)))
    with pytest.raises(UnsupportedError, match="draft without mtp, eagle and block-draft"):
        EncoderDecoderTarget(tiny_seq2seq_lm()).keep_layer_outputs((1,))
