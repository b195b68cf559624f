"""Kept prefixes: bit for bit what was computed, of this model, tenant and tokens alone, and never an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.bitwise_models import by_rows
from helpers.bitwise_models import model as bitwise_model
from helpers.forked import run
from helpers.kept import PREFIX, PROMPT, keep, kept_in, prefilled, restored, tiny
from helpers.packages import graph_settings
from helpers.tiny_architectures import settings_of
from transformers import PreTrainedModel

from precedent.cache import SpeculationCache
from precedent.engine import kept_prefixes
from precedent.engine.kept_prefixes import opened, sealed
from precedent.target import TargetModel, fingerprints
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import tiny_causal_lm


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny())


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SpeculationCache]:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        yield cache


# The same bits


TARGETS: dict[str, Callable[[], TargetModel]] = {
    "float64": lambda: TargetModel(tiny()),
    "bfloat16": lambda: TargetModel(tiny(dtype=torch.bfloat16)),
    "windows": lambda: TargetModel(tiny_causal_lm("gemma3_text", **settings_of("gemma3_text"))),
    "shared layers": lambda: TargetModel(tiny_causal_lm("gemma4_text", **settings_of("gemma4_text"))),
    "many layers": lambda: TargetModel(tiny(num_hidden_layers=11)),
    "fixed sizes": lambda: TargetModel(tiny(), cuda_graphs=graph_settings(arena_tokens=4096, capture=False)),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_what_is_restored_is_what_was_computed_bit_for_bit(kind: str, cache: SpeculationCache) -> None:
    """Rows, and the logits after them, are those of a fork in memory; those of a fresh prefill but for rounding."""
    target = TARGETS[kind]()
    computed = prefilled(target)
    keep(cache, target)
    slot, fork = restored(cache, target), target.fork(computed, len(PREFIX), len(PROMPT))
    assert slot is not None
    assert slot.token_ids == PREFIX
    assert all(map(torch.equal, slot.kv.copied(len(PREFIX)), computed.kv.copied(len(PREFIX))))
    assert slot.kv.nbytes == fork.kv.nbytes
    for one in (slot, fork):
        assert target.prefill(one, PROMPT) == len(PREFIX)
    logits = target.plain_step(slot)
    assert torch.equal(logits, target.plain_step(fork))
    if target.model.dtype == torch.float64:
        torch.testing.assert_close(logits, target.plain_step(computed), rtol=0, atol=1e-9)


@by_rows
def test_with_bitwise_the_logits_are_those_of_a_fresh_prefill(cache: SpeculationCache) -> None:
    target = TargetModel(bitwise_model(), bitwise=True)
    keep(cache, target)
    slot = restored(cache, target)
    target.prefill(slot, PROMPT)
    assert torch.equal(target.plain_step(slot), target.plain_step(prefilled(target)))


# Whose they are


def test_another_tenant_gets_nothing(cache: SpeculationCache, target: TargetModel) -> None:
    keep(cache, target, "shop")
    assert restored(cache, target, "other") is None
    assert restored(cache, target, "shop") is not None


@pytest.mark.parametrize("tenant", ["", "../shop", "a/b", "\ud800", "\x00", "x" * 5000])
def test_a_tenant_may_have_any_name(tenant: str, cache: SpeculationCache, target: TargetModel) -> None:
    assert keep(cache, target, tenant).is_relative_to(cache.prefixes.path)
    assert restored(cache, target, tenant) is not None


def test_a_file_moved_to_another_tenant_is_not_served_and_goes(cache: SpeculationCache, target: TargetModel) -> None:
    """Under its own name nobody looks for it; under the name that is looked for its seal is wrong."""
    kept, file = kept_in(cache, target), keep(cache, target, "shop")
    moved = cache.prefixes._file("other", kept._name("other", PREFIX))
    moved.parent.mkdir()
    file.rename(moved)
    assert restored(cache, target, "other") is None
    assert not moved.exists()


def with_one_bit_changed(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        weight = model.model.layers[-1].mlp.up_proj.weight
        weight.view(torch.int64)[3, 5] ^= 1
    return model


OTHERS: dict[str, Callable[[], TargetModel]] = {
    "a bit of a weight": lambda: TargetModel(with_one_bit_changed(tiny())),
    "weights": lambda: TargetModel(tiny(seed=22)),
    "precision": lambda: TargetModel(tiny(dtype=torch.float32)),
    "attention": lambda: TargetModel(tiny(attn_implementation="eager")),
    "sizes": lambda: TargetModel(tiny(), cuda_graphs=graph_settings(arena_tokens=1024, capture=False)),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_another_model_gets_nothing(difference: str, cache: SpeculationCache, target: TargetModel) -> None:
    keep(cache, target)
    assert restored(cache, OTHERS[difference]()) is None
    assert restored(cache, TargetModel(tiny())) is not None, "equal weights are the same model"


@pytest.mark.parametrize("difference", ["tokenizer", "model", "version", "processor", "format"])
def test_another_surrounding_gets_nothing(
    difference: str, cache: SpeculationCache, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache, target)
    if difference == "version":
        monkeypatch.setattr(fingerprints, "version", lambda package: "0")
    elif difference == "processor":
        monkeypatch.setattr(fingerprints.binding, "get_host_cpu_name", lambda: "another")
    elif difference == "format":
        monkeypatch.setattr(kept_prefixes, "FORMAT", 0)
    changed = {difference: "another"} if difference in ("tokenizer", "model") else {}
    assert restored(cache, target, **changed) is None


def test_a_new_process_finds_what_another_kept(cache: SpeculationCache, target: TargetModel) -> None:
    """What a model is known by does not depend on the process: no order of a set, no address, no random seed."""
    keep(cache, target)
    program = (
        "import sys\n"
        "from decoding.test_kept_prefixes import *\n"
        "with SpeculationCache.open(sys.argv[1], embedder=HashEmbedder()) as cache:\n"
        "    print(restored(cache, TargetModel(tiny())).token_ids == PREFIX)\n"
    )
    ended = run(["-c", program, cache.path])
    assert (ended.stdout, ended.returncode) == ("True\n", 0), ended.stderr


# Damage


def test_no_damage_is_served_and_none_is_an_error(cache: SpeculationCache, target: TargetModel) -> None:
    """Truncated, lengthened, emptied, foreign, and with single bits flipped anywhere, the header above all."""
    file = keep(cache, target)
    sound, chance = file.read_bytes(), random.Random(1)
    header = 8 + int.from_bytes(sound[:8], "little")
    places = [*range(0, header, 7), *(chance.randrange(header, len(sound)) for _ in range(60))]
    flipped = {place: bytes([sound[place] ^ 1 << chance.randrange(8)]) for place in places}
    damaged = [sound[:place] + flipped[place] + sound[place + 1 :] for place in places]
    damaged += [sound[: chance.randrange(len(sound))] for _ in range(20)]
    damaged += [b"", b"x", sound + b"x", bytes(len(sound)), chance.randbytes(1000), sound[:8], sound[:header]]
    kept = kept_in(cache, target)
    for content in damaged:
        file.write_bytes(content)
        slot = kept.restore("shop", PREFIX, len(PROMPT))
        if slot is not None:  # a header's spelling alone: a space for another sign, say
            assert opened(content, file.stem, PREFIX)
            assert all(map(torch.equal, slot.kv.copied(len(PREFIX)), prefilled(target).kv.copied(len(PREFIX))))
            continue
        assert not file.exists(), "it is removed"
    file.write_bytes(sound)
    assert kept.restore("shop", PREFIX, len(PROMPT)) is not None


def test_the_tokens_are_compared_and_not_only_their_digest(cache: SpeculationCache, target: TargetModel) -> None:
    file = keep(cache, target)
    others = [token + 1 for token in PREFIX]
    file.write_bytes(sealed(file.stem, others, prefilled(target, [*others, 5]).kv.copied(len(PREFIX))))
    assert restored(cache, target) is None
    assert not file.exists()


def test_rows_of_another_shape_are_refused(cache: SpeculationCache, target: TargetModel) -> None:
    file, rows = keep(cache, target), prefilled(target).kv.copied(len(PREFIX))
    fewer_heads, fewer_tokens = [part[:, :1] for part in rows], [part[:, :, :50] for part in rows]
    for wrong in ([], rows[:-1], [*rows, rows[0]], fewer_heads, fewer_tokens, [part.float() for part in rows]):
        file.write_bytes(sealed(file.stem, PREFIX, [part.clone().contiguous() for part in wrong]))
        assert restored(cache, target) is None
        assert not file.exists()
