"""The server needs nothing that only Linux has, as far as Linux can show it (`helpers.other_systems`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.other_systems import run_as_on

PROGRAM = """
import asyncio, sys
from helpers.other_systems import import_as_on

assert import_as_on(sys.argv[1], "precedent_server") > 30

from contextlib import closing
from pathlib import Path

import httpx
from precedent_server.app import server_app
from precedent_server.keys import add_key, read_keys
from precedent_server.running import hangups_ignored
from precedent_server.serving import Served, Serving
from precedent_testing.scripted_model import scripted_model_engine

add_key(Path("keys.json"), "desk", tenant="shop")
assert [key.name for key in read_keys(Path("keys.json"))] == ["desk"]

async def ask():
    serving = Serving({"scripted": Served.of("scripted", engine)})
    transport = httpx.ASGITransport(app=server_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "Where is order 1042?"}]}
        return (await client.post("/v1/chat/completions", json=asked)).json()

with hangups_ignored(), closing(scripted_model_engine(["It is on its way."])) as engine:
    print(asyncio.run(ask())["choices"][0]["message"]["content"])
"""


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_the_server_answers_and_keeps_keys_without_what_only_linux_has(system: str, tmp_path: Path) -> None:
    done = run_as_on(system, PROGRAM, tmp_path)
    assert done.stdout == "It is on its way.\n", done.stderr[-3000:]
