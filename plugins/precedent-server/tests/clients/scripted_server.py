"""A real server on models that follow scripts: `python scripted_server.py KEYS` prints its address; SIGTERM ends it.

`echo` says the last turn again, or counts ("Count to 9"). `scripted-model` and `other-model` answer LangChain's
standard tests.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from helpers.standard_answers import answer, thinking_tokenizer

from precedent.cache import SpeculationCache
from precedent_server.keys import KeyFile
from precedent_server.running import serve
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

LIMITS = ServerLimits(max_queued_per_key=16)
"""A key may have as many answers at once as a request may ask for."""


def echo(prompt: str) -> str:
    """The answer of the model `echo`."""
    if "<|im_start|>" not in prompt:  # a text to be continued
        return f" {prompt}"
    turn = prompt.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2]
    said = turn.partition("\n")[2].partition("<|im_end|>")[0].strip()
    if counted := re.fullmatch(r"Count to (\d+)", said):
        return " ".join(map(str, range(1, int(counted[1]) + 1)))
    return said


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with ExitStack() as held:
        cache = held.enter_context(SpeculationCache.open(embedder=HashEmbedder()))
        models = {}
        for name, script in {"echo": echo, "scripted-model": answer, "other-model": answer}.items():
            # an answer that a grammar forbids ends early, since a fuzzer asks for any grammar
            engine = scripted_model_engine(
                script, tokenizer=thinking_tokenizer(), name=name, cache=cache, may_stray=True
            )
            models[name] = Served.of(name, held.enter_context(closing(engine)))
        serving = held.enter_context(closing(Serving(models, LIMITS, KeyFile(Path(sys.argv[1])))))
        serve(serving, "127.0.0.1", 0, ready=lambda address: print(address, flush=True))
