"""Kept prefixes: bit for bit what was computed, of this model, tenant and tokens alone, and never an error."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bitwise_models import by_rows
from helpers.bitwise_models import model as bitwise_model
from helpers.forked import run
from helpers.kept import PREFIX, PROMPT, TOKENIZER, files_of, keep, kept_in, prefilled, restored, tiny
from helpers.packages import graph_settings
from helpers.tiny_architectures import settings_of

from precedent.cache import SpeculationCache, never_store
from precedent.cache import prefixes as prefix_files
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine import kept_prefixes
from precedent.engine.engine import Engine
from precedent.engine.kept_prefixes import content_of, opened
from precedent.planning.costs import CostCurve
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


@pytest.mark.parametrize("tenant", ["", "../shop", "a/b", "\ud800", "\x00", "x" * 5000])
def test_a_tenant_of_any_name_finds_its_own_and_another_nothing(
    tenant: str, cache: SpeculationCache, target: TargetModel
) -> None:
    assert keep(cache, target, tenant).is_relative_to(cache.prefixes.path)
    assert restored(cache, target, tenant) is not None
    assert restored(cache, target, "other") is None


def with_one_bit_changed() -> TargetModel:
    model = tiny()
    with torch.no_grad():
        model.model.layers[-1].mlp.up_proj.weight.view(torch.int64)[3, 5] ^= 1
    return TargetModel(model)


OTHERS: dict[str, Callable[[], TargetModel]] = {
    "a bit of a weight": with_one_bit_changed,
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


@pytest.mark.parametrize("difference", ["tokenizer", "model", "version", "package", "processor", "format"])
def test_another_surrounding_gets_nothing(
    difference: str, cache: SpeculationCache, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(cache, target)
    if difference == "version":
        monkeypatch.setattr(fingerprints, "version", lambda package: "0")
    elif difference == "package":
        monkeypatch.setattr(fingerprints, "entry_points", lambda group: ())
    elif difference == "processor":
        monkeypatch.setattr(fingerprints.binding, "get_host_cpu_name", lambda: "another")
    elif difference == "format":
        monkeypatch.setattr(kept_prefixes, "FORMAT", 0)
    changed = {difference: "another"} if difference in ("tokenizer", "model") else {}
    assert restored(cache, target, **changed) is None


@pytest.mark.slow
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
    start = sound.index(b"\n") + 1
    header = start + 8 + int.from_bytes(sound[start : start + 8], "little")
    places = [*range(0, header, 7), *(chance.randrange(header, len(sound)) for _ in range(60))]
    damaged = [sound[:at] + bytes([sound[at] ^ 1 << chance.randrange(8)]) + sound[at + 1 :] for at in places]
    damaged += [sound[: chance.randrange(len(sound))] for _ in range(20)]
    damaged += [b"", b"x", sound + b"x", bytes(len(sound)), chance.randbytes(1000), sound[:start], sound[:header]]
    kept = kept_in(cache, target)
    for content in damaged:
        file.write_bytes(content)
        assert kept.restore("shop", PREFIX, len(PROMPT)) is None
        assert not file.exists(), "it is removed"
    file.write_bytes(sound)
    assert kept.restore("shop", PREFIX, len(PROMPT)) is not None


# What is written, and when


class Holding(Executor):
    """Runs nothing until it is told to."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.held.append((Future(), lambda: fn(*args, **kwargs)))
        return self.held[-1][0]

    def run(self) -> None:
        """Run what is held."""
        held, self.held = self.held, []
        for future, job in held:
            future.set_result(job())


def test_a_forget_reaches_what_waits_to_be_written(cache: SpeculationCache, target: TargetModel) -> None:
    executor = Holding()
    kept_in(cache, target, executor=executor).keep("shop", prefilled(target), len(PREFIX))
    with SpeculationCache.open(cache.path, embedder=HashEmbedder()) as another:
        another.forget(tenant="shop")
    executor.run()
    assert files_of(cache) == []


def test_later_tokens_do_not_reach_the_copy(cache: SpeculationCache, target: TargetModel) -> None:
    """The slot goes on to serve others while its copy waits."""
    executor, slot = Holding(), prefilled(target)
    expected = slot.kv.copied(len(PREFIX))
    kept_in(cache, target, executor=executor).keep("shop", slot, len(PREFIX))
    target.prefill(slot, [7, *PROMPT])
    executor.run()
    (file,) = files_of(cache)
    assert all(map(torch.equal, opened(file.read_bytes(), file.stem, PREFIX), expected))


def test_what_redaction_would_touch_is_not_kept(tmp_path: Path, target: TargetModel) -> None:
    text, harmless = TOKENIZER.decode(PREFIX), "nowhere in it"
    assert harmless not in text
    for pattern, number in ((harmless, 1), ("(?s).", 0)):
        redact = never_store(pattern)
        with SpeculationCache.open(tmp_path / pattern, embedder=HashEmbedder(), redact=redact) as cache:
            kept_in(cache, target).keep("shop", prefilled(target), len(PREFIX))
            assert len(files_of(cache)) == number


# Engines


def engine_on(folder: Path, **options: Any) -> Engine:
    """An engine as after a restart."""
    place = {"cache": folder / "c.db", "embedder": HashEmbedder(), "keep_prefixes": True}
    engine = Engine.load(tiny(), tokenizer=TOKENIZER, **{**place, **options})
    engine.planner.cost = CostCurve()
    return engine


def ask(engine: Engine, prompt: list[int] = PROMPT, *, tenant: str = "shop", **others: Any) -> tuple[Any, int]:
    """The answer's tokens, and how many tokens of the prompt were not computed."""
    others = {"prefix_tokens": len(PREFIX), **others}
    result = engine.submit(prompt, SamplingParams(max_tokens=12), tenant=tenant, **others).result()
    return result.token_ids, result.cached_prompt_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which an engine that has ended kept a prefix of the tenant "shop"."""
    with closing(engine_on(tmp_path)) as engine:
        assert ask(engine)[1] == 0
    return tmp_path


def test_a_restarted_engine_answers_the_same_from_the_kept_prefix(
    folder: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once; what memory holds then is not read from disk."""
    prompts, reads, read = [[*PREFIX, *said] for said in (b"order 18?", b"hello")], [], prefix_files.PrefixFiles.read
    with closing(engine_on(tmp_path_factory.mktemp("empty"), keep_prefixes=False)) as engine:
        without = [ask(engine, prompt, prefix_tokens=0)[0] for prompt in prompts]
    monkeypatch.setattr(
        prefix_files.PrefixFiles, "read", lambda self, *named: reads.append(named[0]) or read(self, *named)
    )
    with closing(engine_on(folder)) as engine:
        found = [ask(engine, prompt) for prompt in prompts]
        assert found == [(answer, len(PREFIX)) for answer in without]
        assert reads == ["shop"]
        assert ask(engine, tenant="other")[1] == 0
        assert ask(engine, PREFIX, tenant="fresh")[1] == 0, "a prompt that is a prefix and no more"


@pytest.mark.parametrize("condition", ["write_back", "switched off", "prefix_tokens"])
def test_a_request_that_stores_nothing_keeps_nothing(
    condition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if condition == "switched off":
        monkeypatch.setenv("PRECEDENT_SPECULATION", "off")
    told = {
        "write_back": {"speculation": SpeculationConfig(write_back=False)},
        "switched off": {},
        "prefix_tokens": {"prefix_tokens": 0},
    }
    with closing(engine_on(tmp_path)) as engine:
        ask(engine, **told[condition])
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_an_engine_forgets_with_its_cache_and_writes_a_damaged_file_anew(folder: Path) -> None:
    (file,) = folder.rglob("*.safetensors")
    content = file.read_bytes()
    with closing(engine_on(folder)) as engine:
        expected, _ = ask(engine)
    file.write_bytes(content[:-100])
    with closing(engine_on(folder)) as engine:
        assert ask(engine) == (expected, 0)
    assert len(file.read_bytes()) == len(content)
    with closing(engine_on(folder)) as engine:
        engine.cache.forget(tenant="shop")
    with closing(engine_on(folder)) as engine:
        assert ask(engine)[1] == 0


def test_a_file_moved_to_another_tenant_is_not_served_and_goes(cache: SpeculationCache, target: TargetModel) -> None:
    """Under its own name nobody looks for it; under the name that is looked for (white box) its seal is wrong."""
    kept, file = kept_in(cache, target), keep(cache, target, "shop")
    moved = cache.prefixes._file("other", kept._name("other", PREFIX))
    moved.parent.mkdir()
    file.rename(moved)
    assert restored(cache, target, "other") is None
    assert not moved.exists()


def test_tokens_are_compared_and_rows_of_another_shape_refused(cache: SpeculationCache, target: TargetModel) -> None:
    file, rows = keep(cache, target), prefilled(target).kv.copied(len(PREFIX))
    others = [token + 1 for token in PREFIX]
    fewer_heads, fewer_tokens = [part[:, :1] for part in rows], [part[:, :, :50] for part in rows]
    for tokens, wrong in (
        (others, prefilled(target, [*others, 5]).kv.copied(len(PREFIX))),
        *((PREFIX, wrong) for wrong in ([], rows[:-1], [*rows, rows[0]], fewer_heads, fewer_tokens)),
        (PREFIX, [part.float() for part in rows]),
    ):
        file.write_bytes(content_of(file.stem, tokens, [part.clone().contiguous() for part in wrong]))
        assert restored(cache, target) is None
        assert not file.exists()


def test_a_disk_that_runs_full_is_told_once_and_not_written_again(
    cache: SpeculationCache, target: TargetModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_files, "new_file", fail)
    kept = kept_in(cache, target)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            kept.keep("shop", prefilled(target, [number, *PROMPT]), len(PREFIX))
    told = [record.getMessage() for record in caplog.records]
    assert told == ["prefixes are no longer kept: [Errno 28] No space left on device"]
