"""One target model in several processes: the same answers as in one, and an end to every process whatever happens."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.forked import Program

from precedent.engine.engine import Engine
from precedent.errors import ConfigError, PrecedentError, UnsupportedError
from precedent.langchain import ChatPrecedent
from precedent.target.load.loading import load_target
from precedent.testing.tiny_models import byte_tokenizer, tiny_causal_lm

PROGRAM = Path(__file__).with_name("divided_program.py")

pytestmark = pytest.mark.skipif(not (dist.is_available() and hasattr(os, "fork")), reason="needs processes that fork")


class Launched:
    """The processes of one scenario: what they print and find out is in `folder`."""

    def __init__(self, nursery: Program, folder: Path, scenario: str, count: int, **settings: Any) -> None:
        self._nursery, self.folder = nursery, folder
        folder.mkdir()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free
        environments = [environment(rank, count, self._store.port) for rank in range(count)]
        command = {"scenario": scenario, "settings": settings, "folder": str(folder), "environments": environments}
        nursery.stdin.write(json.dumps(command) + "\n")
        nursery.stdin.flush()
        self.pids: list[int] = json.loads(nursery.stdout.readline())

    def exit_codes(self) -> list[int]:
        """Of all processes, in the order of their ranks; waits for them."""
        codes: list[int] = json.loads(self._nursery.stdout.readline())
        return codes

    def printed(self, rank: int) -> str:
        return (self.folder / f"{rank}.txt").read_text(encoding="utf-8")

    def found(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"{rank}.json").read_text(encoding="utf-8"))
        return found

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 300
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, self.printed(0)
            time.sleep(0.01)


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, which transformers reads in parts."""
    folder = tmp_path_factory.mktemp("models")
    settings = {"vocab_size": 260}  # divisible by two, which transformers 5.17 still insists on
    made = {
        "llama": tiny_causal_lm("llama", seed=21, **settings),
        "qwen2": tiny_causal_lm("qwen2", seed=21, dtype=torch.float32, scale=3.0, **settings),
        "qwen3": tiny_causal_lm("qwen3", seed=22, head_dim=16, tie_word_embeddings=True, scale=0.25, **settings),
        "gpt2": tiny_causal_lm("gpt2", seed=23, **settings),
        "draft": tiny_causal_lm("llama", seed=24, num_hidden_layers=1, **settings),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    made["draft"].save_pretrained(folder / "other-tokens")
    byte_tokenizer((("a", "b"),)).save_pretrained(folder / "other-tokens")
    return folder


@pytest.fixture(scope="module")
def nursery() -> Iterator[Program]:
    with Program([PROGRAM]) as running:
        yield running


@pytest.fixture
def launch(nursery: Program, tmp_path: Path) -> Any:
    def started(scenario: str, count: int = 2, **settings: Any) -> Launched:
        return Launched(nursery, tmp_path / f"{scenario}-{count}", scenario, count, **settings)

    return started


# The same answers


@pytest.mark.parametrize(("model", "draft"), [("llama", "draft"), pytest.param("qwen3", None, marks=pytest.mark.slow)])
def test_two_processes_answer_as_one_does(launch: Any, models: Path, model: str, draft: str | None) -> None:
    """Whatever is proposed, reused or answered at once; in float64."""
    settings = {"target": str(models / model), "draft_model": draft and str(models / draft)}
    alone, divided = launch("answers", 1, **settings), None
    assert alone.exit_codes() == [0], alone.printed(0)
    divided = launch("answers", 2, **settings, tensor_parallel=True)
    assert divided.exit_codes() == [0, 0], divided.printed(0)
    expected, found = alone.found(), divided.found()
    for way in ("plain", "cold", "warm", "adversarial", "together"):
        assert found[way] == expected["plain"], way
    for way in ("seeded plain", "seeded"):
        assert found[way] == expected["seeded plain"], way
    assert found["turns"] == expected["turns"]
    assert found["accepted"] > 50
    assert found["reused"] > 50
    assert found["fingerprint"] == expected["fingerprint"]


def test_only_the_first_process_goes_on_behind_a_chat_model(launch: Any, models: Path) -> None:
    """In float32: the kernels of few rows sit out, attention by rows does not."""
    alone = launch("chat", 1, target=str(models / "qwen2"))
    assert alone.exit_codes() == [0], alone.printed(0)
    divided = launch("chat", 2, target=str(models / "qwen2"), tensor_parallel=True)
    assert divided.exit_codes() == [0, 0], divided.printed(0)
    assert divided.found() == alone.found()
    assert not (divided.folder / "1.json").exists()
    assert divided.printed(1) == ""


# The end of it


def test_the_others_end_when_the_first_process_raises(launch: Any, models: Path) -> None:
    launched = launch("raising", target=str(models / "llama"))
    assert launched.exit_codes() == [1, 0]
    assert "ValueError" in launched.printed(0)
    assert launched.printed(1) == ""


def test_the_others_end_when_the_first_process_is_killed(launch: Any, models: Path) -> None:
    launched = launch("killed", target=str(models / "llama"))
    assert launched.exit_codes() == [-signal.SIGKILL, 1]
    assert launched.printed(1).startswith("precedent: process 1 of 2 ends: RuntimeError")


def test_requests_fail_when_another_process_is_gone(launch: Any, models: Path) -> None:
    launched = launch("left_alone", target=str(models / "llama"))
    launched.wait_for("ready")
    os.kill(launched.pids[1], signal.SIGKILL)
    (launched.folder / "go").touch()
    assert launched.exit_codes() == [0, -signal.SIGKILL], launched.printed(0)
    errors = launched.found()["errors"]
    assert len(errors) == 6
    assert all(error.startswith("GenerationError") and "start all processes again" in error for error in errors)


def test_requests_fail_when_another_process_does_not_answer_in_time(launch: Any, models: Path) -> None:
    launched = launch("left_alone", target=str(models / "llama"), timeout=5)
    launched.wait_for("ready")
    os.kill(launched.pids[1], signal.SIGSTOP)
    (launched.folder / "go").touch()
    launched.wait_for("0.json")
    os.kill(launched.pids[1], signal.SIGKILL)
    assert launched.exit_codes() == [0, -signal.SIGKILL]
    assert "did not answer in time" in launched.found()["errors"][0]


# Refusals


@pytest.mark.parametrize(
    ("undivided", "draft", "said", "code"),
    [
        (
            "gpt2",
            None,
            "UnsupportedError: tensor_parallel=True is not available for this gpt2: transformers has no",
            1,
        ),
        ("llama", "other-tokens", "ModelLoadError: the draft model", 0),
    ],
)
def test_what_cannot_be_loaded_keeps_no_process_waiting(
    launch: Any, models: Path, undivided: str, draft: str | None, said: str, code: int
) -> None:
    settings = {"undivided": str(models / undivided), "draft_model": draft and str(models / draft)}
    launched = launch("refused", target=str(models / "llama"), **settings)
    assert launched.exit_codes() == [0, code], launched.printed(0)
    assert launched.found()["first"].startswith(said)
    assert "one launch serves one" in launched.found()["second"]
    assert "divided among processes" in launched.found()["elsewhere"]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({}, ConfigError, "torchrun --nproc-per-node"),
        ({"bitwise": True}, UnsupportedError, "bitwise=True does not work with"),
        ({"cuda_graphs": True}, UnsupportedError, "cuda_graphs=True does not work with"),
        ({"draft_model": "first-layers:1"}, UnsupportedError, "first-layers:1 computes with weights of the target"),
        ({"device": "auto"}, ConfigError, "leave device='auto' out"),
        ({"device": "meta"}, ConfigError, "leave device='meta' out"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_anything_is_loaded(
    settings: dict[str, Any], error: type[PrecedentError], said: str
) -> None:
    with pytest.raises(error, match=said):
        Engine.load("/nowhere", tensor_parallel=True, **settings)


def test_a_trained_draft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "draft.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UnsupportedError, match="computes with weights of the target"):
        Engine.load("/nowhere", draft_model=tmp_path, tensor_parallel=True)


def test_a_model_object_is_refused() -> None:
    model = tiny_causal_lm("llama")
    with pytest.raises(ConfigError, match="needs a name or folder"):
        Engine.load(model, tokenizer=byte_tokenizer(), tensor_parallel=True)
    with pytest.raises(ConfigError, match="tensor_parallel cannot be set for a model object"):
        ChatPrecedent.from_model(model, byte_tokenizer(), tensor_parallel=True)


def test_other_threads_than_the_main_one_are_refused() -> None:
    errors: list[ConfigError] = []

    def load() -> None:
        with pytest.raises(ConfigError) as raised:
            Engine.load("/nowhere", tensor_parallel=True)
        errors.append(raised.value)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.parametrize("name", ["tp_plan", "tp_size", "device_mesh", "distributed_config"])
def test_transformers_own_settings_are_refused(models: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="give tensor_parallel=True"):
        load_target(models / "llama", model_kwargs={name: "auto"})


@pytest.mark.parametrize(
    ("model", "count", "model_kwargs", "said"),
    [
        ("gpt2", 2, {}, "transformers has no tp_plan"),
        ("llama", 4, {}, "4 processes cannot divide its 4 query and 2 key/value heads"),
        ("llama", 3, {}, "3 processes cannot divide"),
        ("llama", 2, {"device_map": "auto"}, "device_map places whole layers"),
        ("llama", 2, {"quantization_config": {}}, "quantised weights are not divided"),
    ],
)
def test_models_that_the_processes_cannot_divide_are_refused(
    models: Path, model: str, count: int, model_kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        load_target(models / model, num_processes=count, model_kwargs=model_kwargs)
