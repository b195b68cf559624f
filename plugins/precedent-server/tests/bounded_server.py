"""Serves a scripted model under limits until its input ends. Run by `test_slow_clients.py`.

python plugins/precedent-server/tests/bounded_server.py LIMITS_AS_JSON
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import closing

from precedent_server.running import serve
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_testing.scripted_model import scripted_model_engine


def stop_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


with (
    closing(scripted_model_engine(lambda prompt: "x", name="scripted")) as engine,
    closing(Serving({"scripted": Served.of("scripted", engine)}, ServerLimits(**json.loads(sys.argv[1])))) as serving,
):
    threading.Thread(target=stop_with_input, daemon=True).start()
    serve(serving, "127.0.0.1", 0, ready=lambda address: print(address, flush=True))
