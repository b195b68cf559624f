"""Serves a scripted model that fails with its prompt in the error, until a signal comes. Run by `test_logs.py`."""

from __future__ import annotations

from contextlib import closing
from typing import NoReturn

from precedent_server.running import serve
from precedent_server.serving import Served, Serving
from precedent_testing.scripted_model import scripted_model_engine


def fail(prompt: str) -> NoReturn:
    """The model's script."""
    raise RuntimeError(f"nothing answers {prompt}")


with (
    closing(scripted_model_engine(fail, name="scripted")) as engine,
    closing(Serving({"scripted": Served.of("scripted", engine)})) as serving,
):
    serve(serving, "127.0.0.1", 0, ready=lambda address: print(address, flush=True))
