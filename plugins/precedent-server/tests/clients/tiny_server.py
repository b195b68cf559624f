"""A real server on one tiny model: `python tiny_server.py KEYS` prints its address; SIGTERM ends it."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

from precedent.engine.engine import Engine
from precedent_server.keys import KeyFile
from precedent_server.running import serve
from precedent_server.serving import Served, Serving
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = tiny_causal_lm("llama", seed=21)
    with (
        closing(Engine.load(model, tokenizer=byte_tokenizer(), name="tiny")) as engine,
        closing(Serving({"tiny": Served.of("tiny", engine)}, keys=KeyFile(Path(sys.argv[1])))) as serving,
    ):
        serve(serving, "127.0.0.1", 0, ready=lambda address: print(address, flush=True))
