"""A real browser on a real server: Debian's Chromium, or the one that PRECEDENT_CHROMIUM names."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from pytest_socket import enable_socket

from precedent_server.keys import KeyFile

CHROMIUM = os.environ.get("PRECEDENT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="make test-browser installs playwright")
    if CHROMIUM is None:
        pytest.fail("there is no Chromium: install Debian's package chromium, or name one in PRECEDENT_CHROMIUM")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to run as root
    with (
        playwright.sync_playwright() as running,
        closing(running.chromium.launch(executable_path=CHROMIUM, args=as_root)) as found,
    ):
        yield found


@pytest.fixture
def start(serve: Any) -> Iterator[Callable[..., str]]:
    """Starts a server whose model follows a script; returns its address. Only the loopback address is used."""
    enable_socket()
    with ExitStack() as held:

        def started(script: Any, *, keys: Path | None = None, kept_steps: int = 0) -> str:
            client = serve(script, keys=None if keys is None else KeyFile(keys), kept_steps=kept_steps)
            return held.enter_context(running_at(client.app))

        yield started


@contextmanager
def running_at(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page of a server; at the end, checks that it asked nobody else and broke no rule."""
    with ExitStack() as held:

        def open_page(address: str, *, quiet: bool = True, **context: Any) -> Any:
            page = held.enter_context(closing(browser.new_context(**context))).new_page()
            said, asked = list[str](), list[str]()
            page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: said.append(f"error: {error}"))
            page.on("request", lambda request: asked.append(request.url))
            if quiet:
                held.callback(check_quiet, address, said, asked)
            page.goto(address)
            return page

        yield open_page


def check_quiet(address: str, said: list[str], asked: list[str]) -> None:
    assert [line for line in said if not (line.startswith("error: Failed to load resource") and "40" in line)] == []
    assert asked
    assert [url for url in asked if not url.startswith((f"{address}/", "data:"))] == []
