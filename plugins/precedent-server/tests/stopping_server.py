"""Serves a scripted model until a signal comes, and says what it closed. Run by `test_stopping.py`.

python plugins/precedent-server/tests/stopping_server.py CACHE GRACE_SECONDS ANSWER [KEYS]
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from sys import argv

from precedent.cache import SpeculationCache
from precedent_server.keys import KeyFile
from precedent_server.running import serve
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

place, grace, answer, *files = argv[1:]
keys = KeyFile(Path(files[0])) if files else None
limits = ServerLimits(grace_seconds=float(grace))
with (
    SpeculationCache.open(Path(place), embedder=HashEmbedder()) as cache,
    closing(scripted_model_engine(lambda prompt: answer, name="scripted", cache=cache)) as engine,
    closing(Serving({"scripted": Served.of("scripted", engine)}, limits, keys)) as serving,
):
    serve(serving, "127.0.0.1", 0, ready=lambda address: print(address, flush=True))
    print("stopped", flush=True)
print("closed", flush=True)
