"""Silences messages and progress bars of other libraries, which would appear in the middle of an answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

_GGUF_READER: Any = modeling_gguf_pytorch_utils


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and advice, not its errors; downloads keep the hub's own progress bar."""
    levels = [(each, each.get_verbosity()) for each in (transformers_logging, hub_logging)]
    bars, downloads_shown = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    bar_of_gguf, _GGUF_READER.tqdm = _GGUF_READER.tqdm, lambda items, **settings: items  # it ignores all settings
    for each, _ in levels:
        each.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if downloads_shown:
        enable_progress_bars()
    try:
        yield
    finally:
        _GGUF_READER.tqdm = bar_of_gguf
        for each, level in levels:
            each.set_verbosity(level)
        if bars and downloads_shown:  # enabling also turns the hub's bars on
            transformers_logging.enable_progress_bar()
