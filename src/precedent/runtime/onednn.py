"""How many products oneDNN keeps compiled for shapes that it has met."""

from __future__ import annotations

import os

KEPT = "64"
"""Products that are kept: those of a model's layers for the last sixteen or so numbers of rows."""


def bound_kept_products() -> None:
    """Keep few of them, unless the user's environment says how many; call it before anything is computed.

    By default torch and oneDNN keep 1,024 each, of up to half a MiB. Prompts come in all lengths, each a new shape that
    seldom comes again, and a server would grow for hours. Compiling one again takes less than computing it once.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT)
    os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT)  # torch's own, beside oneDNN's
