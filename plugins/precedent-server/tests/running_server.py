"""Serves a scripted model until a signal comes or its input ends, and says what it closed. Run by `start_process`.

python plugins/precedent-server/tests/running_server.py SETTINGS_AS_JSON

The settings are `limits`, `answer` (None: the model fails with its prompt in the error), `cache` and `keys` (paths),
and `tls` (paths of a certificate and its key).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from precedent.cache import SpeculationCache
from precedent_server.keys import KeyFile
from precedent_server.running import serve
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_server.tls import Certificate
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

settings: dict[str, Any] = {"limits": {}, "answer": "x", "cache": None, "keys": None, "tls": None} | json.loads(
    sys.argv[1]
)


def answer(prompt: str) -> str:
    """The model's script."""
    if settings["answer"] is None:
        raise RuntimeError(f"nothing answers {prompt}")
    return str(settings["answer"])


def stop_with_input() -> None:
    """Stop when the tests' process goes away."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


threading.Thread(target=stop_with_input, daemon=True).start()
keys = KeyFile(Path(settings["keys"])) if settings["keys"] else None
place = Path(settings["cache"]) if settings["cache"] else None
with (
    SpeculationCache.open(place, embedder=HashEmbedder()) as cache,
    closing(scripted_model_engine(answer, name="scripted", cache=cache, may_stray=True)) as engine,
    closing(Serving({"scripted": Served.of("scripted", engine)}, ServerLimits(**settings["limits"]), keys)) as serving,
):
    certificate = Certificate(*map(Path, settings["tls"])) if settings["tls"] else None
    serve(serving, "127.0.0.1", 0, ready=lambda address: print(address, flush=True), certificate=certificate)
    print("stopped", flush=True)
print("closed", flush=True)
