"""Models that are loaded when they are asked for: the memory budget, keep-alive, failures, and files that change."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from helpers.model_stores import OllamaStore

from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, ModelLoadError
from precedent_server.app import server_app
from precedent_server.errors import ApiError
from precedent_server.model_files import allowed_model, models_in, spellings
from precedent_server.models import Lease, Loader, ModelPool, Served
from precedent_server.serving import ModelOptions, Serving, opened
from precedent_server.settings import ServerLimits
from precedent_testing.scripted_model import scripted_model_engine
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


class PretendedEngine:
    """An engine that only knows whether it was closed."""

    context_length = 512

    def __init__(self, target: str) -> None:
        self.target, self.closed = target, False

    def close(self) -> None:
        self.closed = True


@dataclass
class Machine:
    """Files, a clock and a loader without models: `sizes` by target, `broken` what cannot be loaded.

    A load waits while `open_gate` is cleared.
    """

    sizes: dict[str, int]
    broken: dict[str, Exception] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    engines: list[PretendedEngine] = field(default_factory=list)
    now: float = 0.0
    open_gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open_gate.set()

    def load(self, target: str, names: Sequence[str]) -> dict[str, Served]:
        self.begun.set()
        assert self.open_gate.wait(60)
        self.loads.append(target)
        if target in self.broken:
            raise self.broken[target]
        engine = PretendedEngine(target)
        self.engines.append(engine)
        return {name: Served(name, cast("Any", engine), cast("Any", None), {}) for name in names}

    def pool(self, *names: str, max_bytes: float = 100, **options: Any) -> ModelPool:
        loader = Loader(
            self.load,
            size=lambda target: self.sizes[target],
            held=lambda engine: self.sizes[cast("Any", engine).target],
            stamp=lambda target: (self.versions.get(target, 0),),
            collect=lambda gone: None,
        )
        made = ModelPool(loader, max_bytes=max_bytes, clock=lambda: self.now, **options)
        for name in names:
            made.add(name, name)
        return made

    @property
    def running(self) -> list[str]:
        """Targets of engines that are not closed."""
        return [engine.target for engine in self.engines if not engine.closed]


async def ask(pool: ModelPool, name: str, keep_alive: float | None = None) -> Served:
    with pool.lease(name, keep_alive) as lease:
        return await lease.model()


async def hold(pool: ModelPool, name: str, keep_alive: float | None = None) -> Lease:
    """A running request; `__exit__` ends it."""
    lease = pool.lease(name, keep_alive).__enter__()
    await lease.model()
    return lease


async def settled(pool: ModelPool) -> None:
    """Wait until the loading thread has nothing to do."""
    while pool._tasks:  # no caller waits for loads that nobody asks for any more
        await asyncio.sleep(0.001)
    await asyncio.wrap_future(pool._thread.submit(int))


@pytest.fixture
def machine() -> Machine:
    return Machine({"a": 40, "b": 40, "c": 40, "d": 100, "huge": 101})


@pytest.fixture
def pooled(machine: Machine) -> Iterator[Callable[..., ModelPool]]:
    pools = list[ModelPool]()

    def make(*names: str, **options: Any) -> ModelPool:
        pools.append(machine.pool(*names or machine.sizes, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


async def test_the_least_recently_used_model_goes_first_and_never_one_with_requests(machine: Any, pooled: Any) -> None:
    pool = pooled()
    for machine.now, name in enumerate("abac"):
        await ask(pool, name)
    assert list(pool) == ["a", "c"]
    machine.now += 1
    running = await hold(pool, "a")
    machine.now += 1
    await ask(pool, "c")
    await ask(pool, "b")
    assert list(pool) == ["a", "b"], "a was used before c, and runs"
    other = await hold(pool, "b")
    with pytest.raises(ApiError, match="while others run \\(a, b\\)") as refused:
        await ask(pool, "c")
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "5"})
    with pytest.raises(ApiError):
        await ask(pool, "d")
    other.__exit__()
    with pytest.raises(ApiError):
        await ask(pool, "d")
    assert list(pool) == ["a", "b"], "none is unloaded for a model that would not fit then either"
    running.__exit__()
    await ask(pool, "d")
    await settled(pool)
    assert machine.running == ["d"]
    assert (pool.counts, pool.bytes) == ((5, 4, 100), 100)


async def test_a_model_larger_than_the_budget_is_refused_by_name(machine: Any, pooled: Any) -> None:
    pool = pooled()
    await ask(pool, "a")
    with pytest.raises(ApiError, match="'huge' takes") as refused:
        await ask(pool, "huge")
    assert (refused.value.status, refused.value.error.param, list(pool)) == (400, "model", ["a"])
    real = dict(machine.sizes, b=200)
    pool._loader = Loader(  # files do not tell all: what the engine takes is known once it is loaded
        machine.load, lambda target: machine.sizes[target], lambda engine: real[engine.target], lambda target: (),
        lambda gone: None,
    )  # fmt: skip
    with pytest.raises(ApiError, match="'b' takes"):
        await ask(pool, "b")
    await settled(pool)
    assert machine.running == ["a"]
    with pytest.raises(ConfigError, match="--max-model-bytes"):
        machine.pool("huge").preload()


async def test_what_is_named_is_loaded_at_the_start_as_far_as_the_budget_allows(machine: Any, pooled: Any) -> None:
    pool, told = pooled("a", "b", "c"), list[str]()
    pool.preload(told.append)
    assert list(pool) == told == ["a", "b"]
    await ask(pool, "c")
    assert list(pool) == ["b", "c"]


async def test_callers_of_one_model_share_its_load_and_one_that_leaves_does_not_end_it(
    machine: Any, pooled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "precedent_server")
    pool = pooled(keep_alive=10)
    await ask(pool, "a")
    machine.open_gate.clear()
    callers = [asyncio.create_task(hold(pool, "b")) for _ in range(3)]
    await asyncio.sleep(0.01)
    callers[0].cancel()
    assert (await ask(pool, "a")).name == "a", "a loaded model answers while another is loaded"
    machine.open_gate.set()
    leases = await asyncio.gather(*callers[1:])
    assert machine.loads == ["a", "b"]
    machine.now = 1000
    pool.expire()
    assert list(pool) == ["b"]
    assert caplog.messages == ["loading a", "loading b", "unloading a"]
    for lease in leases:
        lease.__exit__()
    assert pool["b"].engine is machine.engines[1]


async def test_a_load_that_everybody_left_is_finished_and_kept_for_its_time(machine: Any, pooled: Any) -> None:
    pool = pooled(keep_alive=10)
    machine.open_gate.clear()
    caller = asyncio.create_task(ask(pool, "a"))
    await asyncio.sleep(0.01)
    caller.cancel()
    machine.open_gate.set()
    await settled(pool)
    assert list(pool) == ["a"]
    machine.now = 10
    pool.expire()
    assert not pool


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("dtype='x' is not one"), 400, "dtype='x'"),
        (ModelLoadError("/secret/path is damaged"), 500, "'a' could not be loaded; the server's log says why"),
        (RuntimeError("boom"), 500, "'a' could not be loaded"),
    ],
)
async def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(
    machine: Any, pooled: Any, error: Exception, status: int, said: str
) -> None:
    pool = pooled()
    running = await hold(pool, "b")
    machine.broken["a"] = error
    failed = await asyncio.gather(ask(pool, "a"), ask(pool, "a"), return_exceptions=True)
    assert [(one.status, said in str(one), "/secret" in str(one)) for one in failed] == [(status, True, False)] * 2
    assert machine.loads == ["b", "a"]
    del machine.broken["a"]
    assert (await ask(pool, "a")).name == "a"
    running.__exit__()
    assert list(pool) == ["a", "b"]


async def test_how_long_an_idle_model_stays(machine: Any, pooled: Any) -> None:
    pool = pooled(max_bytes=1000)
    pool.add("mine", "a", origin="folder", key="folder")
    await ask(pool, "mine")
    await ask(pool, "a", 0)
    await ask(pool, "b", 60)
    await ask(pool, "c")
    await ask(pool, "d", float("inf"))
    assert list(pool) == ["b", "c", "d", "mine"], "0 is until the last request ends"
    first, second = await hold(pool, "c", 0), await hold(pool, "c")
    first.__exit__()
    assert "c" in pool
    second.__exit__()
    assert "c" not in pool
    machine.now = 59
    pool.expire()
    assert list(pool) == ["b", "d", "mine"]
    running = await hold(pool, "b")
    machine.now = 299
    pool.expire()
    assert list(pool) == ["b", "d", "mine"], "the time counts from the last request's end"
    running.__exit__()
    machine.now = 300
    pool.expire()
    assert list(pool) == ["b", "d"], "five minutes where nobody says how long"
    machine.now = 359
    pool.expire()
    assert list(pool) == ["d"], "as long as the last request that said so"
    await pool.unload("d")
    await pool.unload("d")
    await settled(pool)
    assert not machine.running


async def test_a_timer_unloads(machine: Any, pooled: Any) -> None:
    pool = pooled()
    await ask(pool, "a", 0.001)
    machine.now = 1
    while pool:
        await asyncio.sleep(0.001)


async def test_names_that_are_not_served(machine: Any, pooled: Any, tmp_path: Path) -> None:
    file = tmp_path / "secret.gguf"
    file.write_bytes(b"GGUF")
    for pool in (pooled("a"), pooled("a", allowed=("ollama:*", "*"))):
        for name in ("../x", str(file), "file:///etc/passwd", "https://x.org/y", "ollama:b", "..", "", "a/../b",
                     "ollama:../../x", "hf:../x", "lmstudio:../../x", "lmstudio:/etc/passwd", "a\0b", "ollama:a:b:c",
                     f"ollama:{file}", "x" * 10_000, "a/" + "x" * 10_000, "~/x", "."):  # fmt: skip
            with pytest.raises(ApiError) as refused:
                await ask(pool, name)
            assert (refused.value.status, refused.value.error.code) == (404, "model_not_found"), name
            assert "secret" not in str(refused.value) or name in str(refused.value)
        assert [entry.names for entry in pool.entries] == [["a"]]
        assert refused.value.error.message.endswith(f"models: {', '.join(('a', *pool.allowed))}")
    assert not machine.loads


async def test_what_other_programs_keep_is_loaded_where_it_is_allowed(
    pooled: Any, machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OllamaStore(tmp_path)
    for name in ("smollm2/latest", "smollm2/135m", "qwen3/4b"):
        store.add(f"registry.ollama.ai/library/{name}", b"GGUF")
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    machine.sizes |= {"ollama:smollm2:latest": 40, "ollama:qwen3:4b": 40}
    pool = pooled("a", allowed=("ollama:smollm2",))
    leases = [await hold(pool, one) for one in ("smollm2", "smollm2:latest", "ollama:smollm2", "SmolLM2")]
    assert {lease.ready.name for lease in leases} == {"ollama:smollm2:latest"}
    assert machine.loads == ["ollama:smollm2:latest"]
    for name in ("smollm2:135m", "qwen3:4b", "gemma3", "ollama:gemma3"):
        with pytest.raises(ApiError) as refused:
            await ask(pool, name)
        assert refused.value.status == 404
    for lease in leases:
        lease.__exit__()
    await pool.unload("smollm2")
    assert [entry.names for entry in pool.entries] == [["a"]], "what a client asked for is forgotten"
    assert allowed_model("qwen3:4b", ["ollama:qwen*"]) is not None
    assert allowed_model("hf:Qwen/Qwen3-4B-GGUF", ["hf:*"]) is None, "nothing is downloaded"


def test_a_folder_of_models(tmp_path: Path) -> None:
    for name in ("small.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-x.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    assert set(models_in(tmp_path)) == {"small", "big", "checkpoint"}
    assert {"llama3-8b", "llama3:8b"} <= set(spellings("llama3:8b"))
    with pytest.raises(ConfigError, match="--model-dir"):
        models_in(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="--keep-alive"):
        ModelOptions(keep_alive=-1)


async def test_models_that_come_go_and_change_while_a_request_runs(pooled: Any, machine: Any, tmp_path: Path) -> None:
    for name in ("old", "kept"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    files = {name: str(tmp_path / f"{name}.gguf") for name in ("old", "kept", "new")}
    machine.sizes |= dict.fromkeys(files.values(), 30)
    pool = machine.pool(max_bytes=100, folder=tmp_path)
    pool.scan()
    streams = {name: await hold(pool, name) for name in ("old", "kept")}
    Path(files["old"]).rename(files["new"])
    machine.versions[files["kept"]] = 1
    await pool.reload()
    after = await hold(pool, "kept")
    assert after.ready.engine is not streams["kept"].ready.engine, "new requests go to the new engine"
    assert machine.running == [files["old"], files["kept"], files["kept"]], "and running ones end on theirs"
    assert await ask(pool, "kept:latest") is after.ready
    with pytest.raises(ApiError, match="no model 'old'"):
        pool.lease("old").__enter__()
    assert [name for entry in pool.entries for name in entry.names] == ["kept", "new"]
    for lease in streams.values():
        lease.__exit__()
    await settled(pool)
    assert machine.running == [files["kept"]]
    await pool.reload()
    assert machine.loads.count(files["kept"]) == 2, "what did not change is not loaded again"
    after.__exit__()
    pool.close()


async def test_a_model_that_cannot_be_loaded_anew_stays_as_it_was(pooled: Any, machine: Any) -> None:
    pool = pooled()
    await ask(pool, "a")
    machine.versions["a"], machine.broken["a"] = 1, ModelLoadError("half a file")
    await pool.reload()
    assert pool["a"].engine is machine.engines[0]
    assert "not loaded anew" in pool.faults["a"][0]
    del machine.broken["a"]
    await pool.reload()
    assert pool["a"].engine is machine.engines[1]
    assert not pool.faults


async def test_without_memory_for_both_the_old_one_is_replaced_when_it_is_idle(pooled: Any, machine: Any) -> None:
    pool = pooled()
    running = await hold(pool, "d")
    machine.versions["d"] = 1
    await pool.reload()
    assert "when it is idle" in pool.faults["d"][0]
    assert (await ask(pool, "d")).engine is machine.engines[0]
    running.__exit__()
    await settled(pool)
    assert machine.running == ["d"]
    assert pool["d"].engine is machine.engines[1]
    assert not pool.faults


async def test_closing_during_a_load(machine: Any) -> None:
    pool = machine.pool("a")
    machine.open_gate.clear()
    caller = asyncio.create_task(ask(pool, "a"))
    while not machine.begun.is_set():
        await asyncio.sleep(0.001)
    pool.close()
    machine.open_gate.set()
    with pytest.raises(ApiError, match="stopping"):
        await caller
    assert not machine.running
    assert machine.loads == ["a"]


@pytest.mark.parametrize("seed", range(4))
async def test_any_order_of_requests_loads_failures_and_unloads_keeps_the_rules(pooled: Any, seed: int) -> None:
    """The budget holds, nothing that runs is closed, and every failure is one that the rules name."""
    rng = random.Random(seed)
    machine = Machine({name: rng.choice((20, 40, 60, 110)) for name in "abcdef"})
    pool = machine.pool(*"abcdef", keep_alive=rng.choice((0, 5, None)))
    refused = list[tuple[int, bool]]()

    async def request() -> None:
        name = rng.choice("abcdef")
        try:
            with pool.lease(name, rng.choice((None, None, 0, 3, float("inf")))) as lease:
                engine: Any = (await lease.model()).engine
                for _ in range(rng.randrange(4)):
                    assert not engine.closed
                    assert pool.bytes <= pool.max_bytes
                    await asyncio.sleep(0)
                assert not engine.closed
        except ApiError as error:
            refused.append((error.status, machine.sizes[name] > pool.max_bytes))

    running = set[asyncio.Task[None]]()
    for _ in range(100):
        machine.now += rng.choice((0, 1, 4))
        action = rng.random()
        if action < 0.6:
            running.add(asyncio.create_task(request()))
        elif action < 0.68 and running:
            rng.choice(sorted(running, key=id)).cancel()
        elif action < 0.76:
            await pool.unload(rng.choice("abcdef"))
        elif action < 0.84:
            machine.broken = {rng.choice("abcdef"): ModelLoadError("no")} if rng.random() < 0.5 else {}
        elif action < 0.92:
            machine.versions[rng.choice("abcdef")] = rng.randrange(100)
            pool.begin_reload()
        else:
            pool.expire()
        await asyncio.sleep(rng.choice((0, 0, 0.001)))
        running = {task for task in running if not task.done()}
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert not [one for one in outcomes if isinstance(one, Exception)]
    assert set(refused) <= {(400, True), (500, False), (503, False)}
    await settled(pool)
    pool.expire()
    await settled(pool)
    assert sorted(machine.running) == sorted(pool), "each loaded model has its engine, and no other is left open"
    assert pool.bytes == sum(machine.sizes[name] for name in pool) <= pool.max_bytes
    pool.close()
    assert not machine.running


async def test_a_server_whose_models_are_not_loaded(serve: Any) -> None:
    """Routes name them, answer with them once they are loaded, and describe the others."""
    loads = list[str]()

    def load(target: str, names: Sequence[str]) -> dict[str, Served]:
        loads.append(target)
        engine = scripted_model_engine(lambda prompt: f"I am {target}", name=names[0])
        return {name: Served.of(name, engine) for name in names}

    client = serve("x")
    pool = ModelPool(Loader(load, size=lambda target: 0, stamp=lambda target: (), collect=lambda gone: None))
    pool.add("one", "first")
    pool.add("two", "second")
    client.serving.models.close()
    client.serving.models = pool
    body = {"model": "two:latest", "messages": [{"role": "user", "content": "Who?"}], "temperature": 0}
    told = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
    assert [one["loaded"] for one in told.values()] == [False, False]
    assert (await client.get("/health")).json() == {"status": "ok"}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "I am second"
    stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert stream.text.endswith("data: [DONE]\n\n")
    assert loads == ["second"]
    told = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
    assert (told["one"]["loaded"], told["two"]["loaded"], "max_model_len" in told["one"]) == (False, True, False)
    metrics = (await client.get("/metrics")).text
    assert "precedent:models_loaded_total 1" in metrics
    assert 'model_name="two",engine="1"' in metrics
    assert 'model_name="one"' not in metrics
    assert list((await client.get("/dashboard/figures")).json()["models"]) == ["two"]
    assert (await client.get("/v1/models/three")).status_code == 404
    assert (await client.post("/v1/chat/completions", json={**body, "model": "three"})).status_code == 404
    await pool.unload("two")
    assert [entry.instance for entry in pool.entries] == [None, None]
    assert (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
    assert loads == ["second"] * 2


def test_a_server_of_loaded_models_closes_none_of_them() -> None:
    engine = PretendedEngine("x")
    served = Served("x", cast("Any", engine), cast("Any", None), {})
    engine.target = cast("Any", type("Target", (), {"weights": dict}))
    Serving({"x": served}).close()
    assert not engine.closed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint, `tiny`."""
    found = tmp_path_factory.mktemp("models")
    tiny_causal_lm(dtype=torch.float32, max_position_embeddings=256).save_pretrained(found / "tiny")
    byte_tokenizer().save_pretrained(found / "tiny")
    return found


async def test_a_folder_is_served_without_any_named_model(folder: Path) -> None:
    """What is unloaded and loaded again answers the same; Ollama's routes describe it all the while."""
    with opened({}, EngineOptions(device="cpu"), ServerLimits(), more=ModelOptions(folder)) as serving:
        transport = httpx.ASGITransport(server_app(serving))
        pool, client = serving.models, httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")
        asked = {"model": "tiny:latest", "prompt": "Where?", "temperature": 0, "max_tokens": 8}
        (listed,) = (await client.get("/api/tags")).json()["models"]
        details = {"format": "safetensors", "family": "llama", "parent_model": "", "families": ["llama"]}
        assert listed["name"] == listed["model"] == "tiny:latest"
        assert details.items() <= listed["details"].items()
        assert listed["size"] > 1000
        assert len(listed["digest"]) == 64
        assert (await client.get("/api/ps")).json() == {"models": []}
        first = await client.post("/v1/completions", json=asked)
        (running,) = (await client.get("/api/ps")).json()["models"]
        assert (running["name"], running["context_length"], running["size_vram"]) == ("tiny:latest", 256, 0)
        assert 0 < running["size"] == pool.bytes
        assert (
            datetime.now(UTC) < datetime.fromisoformat(running["expires_at"]) < datetime.now(UTC) + timedelta(hours=1)
        )
        gone = weakref.ref(pool["tiny"].engine)
        await pool.unload("tiny")
        await settled(pool)
        assert gone() is None, "its memory is free"
        again = await client.post("/v1/completions", json=asked)
        assert first.json()["choices"] == again.json()["choices"]
        before = pool["tiny"].engine
        os.utime(folder / "tiny" / "config.json", ns=(1, 1))
        await pool.reload()
        assert pool["tiny"].engine is not before
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
        assert shown["model_info"]["llama.context_length"] == 256
        assert shown["model_info"]["general.parameter_count"] > 1000
        assert shown["capabilities"][0] == "completion"
        assert (await client.post("/api/show", json={"model": "tiny2"})).status_code == 404
        refused = await client.post("/api/show", json={})
        assert (refused.status_code, list(refused.json())) == (400, ["error"])


@pytest.mark.parametrize("given", [{}, {"name": None}, {"model": 3}, {"model": ["x"]}, {"model": {}}])
async def test_a_description_of_no_model_is_refused_in_ollamas_form(client: Any, given: dict[str, Any]) -> None:
    answer = await client.post("/api/show", json=given)
    assert (answer.status_code, isinstance(answer.json()["error"], str)) == (400, True)


async def test_a_model_of_ollamas_store_is_described(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_causal_lm(dtype=torch.float32, vocab_size=260, max_position_embeddings=256)
    file = write_gguf(tmp_path / "tiny.gguf", model, byte_tokenizer((("t", "h"),)))
    store = OllamaStore(tmp_path / "ollama")
    params = {"top_k": 5, "stop": ["<a>", "<b>"]}
    store.add(
        "registry.ollama.ai/library/tiny/latest", file, params=params, template="{{ .Prompt }}", system="Be brief."
    )
    store.add("registry.ollama.ai/library/other/latest", file)
    monkeypatch.setenv("OLLAMA_MODELS", str(store.folder))
    client = serve("x")
    client.serving.models.close()
    client.serving.models = ModelPool(Loader(cast("Any", None)), allowed=("ollama:t*",))
    (listed,) = (await client.get("/api/tags")).json()["models"]
    assert (listed["name"], listed["details"]["format"], listed["size"]) == ("tiny:latest", "gguf", file.stat().st_size)
    shown = (await client.post("/api/show", json={"model": "tiny"})).json()
    assert (shown["template"], shown["system"]) == ("{{ .Prompt }}", "Be brief.")
    lines = [line.split() for line in shown["parameters"].splitlines()]
    assert lines == [["top_k", "5"], ["stop", '"<a>"'], ["stop", '"<b>"'], ["temperature", "0.8"]]  # Ollama's own
    assert shown["model_info"]["general.architecture"] == "llama"
    assert (await client.post("/api/show", json={"model": "other"})).status_code == 404
    assert not list(client.serving.models.entries)
