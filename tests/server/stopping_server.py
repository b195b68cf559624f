"""Serves a scripted model until a signal comes, and says what it closed. Run by `test_stopping.py`.

python tests/server/stopping_server.py CACHE GRACE_SECONDS ANSWER
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from sys import argv

from precedent.cache import SpeculationCache
from precedent.server.running import serve
from precedent.server.serving import Served, Serving
from precedent.server.settings import ServerLimits
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_model_engine

place, grace, answer = argv[1:]
with (
    SpeculationCache.open(Path(place), embedder=HashEmbedder()) as cache,
    closing(scripted_model_engine(lambda prompt: answer, name="scripted", cache=cache)) as engine,
    closing(Serving({"scripted": Served.of("scripted", engine)}, ServerLimits(grace_seconds=float(grace)))) as serving,
):
    serve(serving, "127.0.0.1", 0, ready=lambda address: print(address, flush=True))
    print("stopped", flush=True)
print("closed", flush=True)
