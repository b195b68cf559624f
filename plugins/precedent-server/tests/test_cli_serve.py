"""`precedent serve`: what it refuses before it loads anything, where its options come from, and its access log."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import precedent

from precedent.cache import SpeculationCache
from precedent.engine.engine import Engine
from precedent_server import running
from precedent_server.access import AccessRules
from precedent_server.access_log import AccessFormatter, write_logs
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would be served, instead of serving it; targets are loaded by none."""
    found: list[dict[str, Any]] = []

    class NoEngine:
        closed = False
        context_length = 512

        def __init__(self, source: str, options: Any, name: str) -> None:
            self.source, self.options, self.model_name, self.target = source, options, name, self

        def weights(self) -> dict[str, Any]:
            return {}

        def close(self) -> None:
            self.closed = True

        def watch_steps(self, observer: Any) -> None:
            """Nothing happens here that might be seen."""

    def serve(serving: Any, host: str, port: int, *, ready: Any, log_json: bool, certificate: Any) -> None:
        ready(f"http://{host}:{port}")
        engines = {name: one.engine for name, one in serving.models.items()}
        models = {name: engine.source for name, engine in engines.items()}
        device = next((engine.options.device for engine in engines.values()), None)
        found.append({"serving": serving, "host": host, "port": port, "engines": engines, "models": models})
        found[-1] |= {"device": device, "limits": serving.limits, "access": serving.access}

    monkeypatch.setattr(Engine, "load", NoEngine)
    monkeypatch.setattr(running, "serve", serve)
    monkeypatch.setattr(running, "check_port", lambda host, port: None)
    monkeypatch.setattr("precedent_server.models.ChatPrecedent.from_engine", lambda engine, **given: None)
    return found


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two models on disk."""
    for name in ("first", "second"):
        tiny_causal_lm(vocab_size=300).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    return tmp_path / "first", tmp_path / "second"


def test_several_models(served: Any, folders: tuple[Path, Path]) -> None:
    first, second = map(str, folders)
    assert precedent("serve", "--model", f"a={first}", "--model", f"b={second}") == 0
    assert served[0]["models"] == {"a": first, "b": second}
    assert precedent("serve", "--model", f"a={first}", "--model", f"a={second}") == 2


def test_two_names_of_one_target_share_its_engine(served: Any, folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    (tmp_path / "link").symlink_to(first)
    names = [f"a={first}", f"b={second}", f"c={tmp_path / 'link'}", f"d={first}/"]
    assert precedent("serve", *[part for name in names for part in ("--model", name)]) == 0
    engines = served[0]["engines"]
    assert engines["a"] is engines["c"] is engines["d"] is not engines["b"]


def test_a_folder_of_models_needs_no_named_one(
    served: Any, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders[0].parent
    options = ("--model-dir", folder, "--allow-load", "ollama:a", "--allow-load", "x/*", "--max-model-bytes", "9")
    assert precedent("serve", *options, "--keep-alive", "7") == 0
    pool = served[0]["serving"].models
    assert ([entry.names for entry in pool.entries], list(pool)) == ([["first"], ["second"]], [])
    assert (pool.allowed, pool.max_bytes) == (("ollama:a", "x/*"), 9)
    assert precedent("serve", "--model-dir", folder, "--target", "smollm2-135m-instruct") == 0
    assert list(served[1]["models"]) == ["smollm2-135m-instruct"]
    assert f"serving smollm2-135m-instruct, models of {folder} at" in capsys.readouterr().err
    assert precedent("serve", "--model-dir", folder / "nowhere") == 2
    assert precedent("serve", "--model-dir", folder, "--keep-alive", "-1") == 2
    assert "--keep-alive" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["nowhere", "empty", "damaged"])
def test_a_bad_model_is_found_before_the_first_is_loaded(
    served: Any, folders: tuple[Path, Path], tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    loaded: list[Any] = []
    Engine.load, before = lambda *given, **more: loaded.append(given), Engine.load  # type: ignore[method-assign]
    try:
        assert precedent("serve", "--model", f"a={folders[0]}", "--model", f"b={tmp_path / bad}") == 2
    finally:
        Engine.load = before  # type: ignore[method-assign]
    assert not loaded
    assert bad in capsys.readouterr().err


@pytest.mark.enable_socket
def test_a_port_that_is_taken_is_found_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    tiny_causal_lm(vocab_size=300).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert precedent("serve", "--target", tmp_path, "--port", port) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_hosts_and_origins(served: Any, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    allowed = ("--allowed-hosts", "models.internal", "--cors-origins", "https://app.example.org")
    assert precedent("serve", "--target", str(folders[0]), "--host", "0.0.0.0", *allowed) == 0
    assert served[0]["access"] == AccessRules(("models.internal",), ("https://app.example.org",))
    for wrong in (
        ("--allowed-hosts", "http://x"), ("--cors-origins", "x.org"), ("--cors-origins", "https://x.org/"),
        ("--cors-origins", "*"),
    ):  # fmt: skip
        assert precedent("serve", *wrong) == 2
        assert wrong[0] in capsys.readouterr().err
    assert len(served) == 1


def test_a_cache_has_the_bounds_that_are_given(
    served: Any,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[dict[str, Any]] = []
    plain = SpeculationCache.open
    monkeypatch.setattr(SpeculationCache, "open", lambda place, **given: seen.append(given) or plain(place))
    given = ("serve", "--target", str(folders[0]), "--cache", str(tmp_path / "cache"))
    bounds = ("--max-tenant-bytes", "5000", "--max-age", "60")
    assert precedent(*given, *bounds, "--max-cache-bytes", "9000") == 0
    (given,) = seen
    assert (given["max_bytes"], given["max_tenant_bytes"], given["max_age"]) == (9000, 5000, 60.0)
    assert precedent("serve", "--cache", str(tmp_path / "cache"), "--max-age", "0") == 2
    assert "max_age=0.0 must be at least 1" in capsys.readouterr().err
    assert precedent("serve", *bounds) == 2
    assert "give --cache as well" in capsys.readouterr().err


def test_command_line_before_environment_before_file(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 1\nmax-queued = 11\ngrace-seconds = 1.5\nmodel = ["a=first"]\n', encoding="utf-8")
    monkeypatch.setenv("PRECEDENT_SERVE_MAX_QUEUED", "12")
    monkeypatch.setenv("PRECEDENT_SERVE_PORT", "2")
    monkeypatch.setenv("PRECEDENT_SERVE_DEVICE", "cpu")
    assert precedent("serve", "--config", file, "--port", "3") == 0
    (found,) = served
    assert (found["port"], found["limits"].max_queued, found["limits"].grace_seconds) == (3, 12, 1.5)
    assert (found["models"], found["device"]) == ({"a": "first"}, "cpu")


@pytest.mark.parametrize("text", ["prot = 1", "port =", 'port = "high"'])
def test_a_file_that_is_wrong(served: Any, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.toml").write_text(text, encoding="utf-8")
    assert precedent("serve", "--config", tmp_path / "server.toml") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not served


LINE = {"method": "GET", "path": "/", "status": 200, "seconds": 0.5, "key": "desk", "request_id": "r"}
FORGED = "/\n2026-01-01 desk GET /forged 200 0.001s r\r\x1b[2J\x00\x85\u2028\u202e\udc80"


def test_the_access_log() -> None:
    record = logging.makeLogRecord({"request": LINE})
    assert AccessFormatter(as_json=False).format(record).endswith(" desk GET / 200 0.500s r")
    assert json.loads(AccessFormatter(as_json=True).format(record)).items() >= LINE.items()


def test_the_log_tells_which_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    access, ours = logging.getLogger("precedent.access"), logging.getLogger("precedent_server")
    for logger, changed in ((logging.root, "handlers"), (access, "handlers"), (access, "propagate"), (ours, "level")):
        monkeypatch.setattr(logger, changed, type(getattr(logger, changed))())
    write_logs(as_json=False)
    logging.getLogger("precedent_server.models").info("loading %s", "a\nb")
    assert capsys.readouterr().err == "loading a\\nb\n"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("field", ["path", "method", "key", "request_id"])
def test_nothing_that_a_client_sends_begins_a_line_or_commands_a_terminal(as_json: bool, field: str) -> None:
    written = AccessFormatter(as_json).format(logging.makeLogRecord({"request": LINE | {field: FORGED}}))
    assert len(written.splitlines()) == 1
    assert written.isprintable()
    assert written.encode()


def test_a_folder_is_served_by_its_name(served: Any, folders: tuple[Path, Path]) -> None:
    assert precedent("serve", "--target", folders[0]) == 0
    (engine,) = served[0]["engines"].values()
    assert list(served[0]["models"]) == ["first"] == [engine.model_name]
