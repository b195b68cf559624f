"""Silences messages and progress bars of other libraries, which would appear in the middle of an answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers import modeling_gguf_pytorch_utils as gguf_reading
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and advice, not its errors; downloads keep the hub's own progress bar."""
    verbosity, hub_verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    downloads_shown = not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if downloads_shown:
        enable_progress_bars()
    try:
        with _no_bar_of_gguf():
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars and downloads_shown:  # enabling also turns the hub's bars on
            transformers_logging.enable_progress_bar()


@contextmanager
def _no_bar_of_gguf() -> Iterator[None]:
    """Hide the bar of transformers' GGUF reader, which ignores all settings."""
    module: Any = gguf_reading
    bar, module.tqdm = module.tqdm, lambda items, **settings: items
    try:
        yield
    finally:
        module.tqdm = bar
