"""A model in llama.cpp: its weights, one context that all sequences share, and what they store there.

A token that is computed belongs to one or more sequences, and sees the stored tokens of its sequences that stand
before it. So sequences that share tokens store them once, and one batch computes a candidate tree: each node belongs
to the sequences of the leaves below it. llama.cpp makes the mask from that (docs/how-to/llama-cpp.md).

Written for the structures of one version of llama-cpp-python (`KNOWN`), through its ctypes declarations.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.runtime.device_memory import free_bytes
from precedent.runtime.plain_values import is_whole
from precedent.runtime.team import TEAM

KNOWN = ("0.3.36",)
"""Versions of llama-cpp-python whose structures are those used here; the tests run them."""

MOST_SEQUENCES = 256
"""`LLAMA_MAX_SEQ`."""

BATCH = 2048
"""Rows of one call of `llama_decode` at most."""

SMALLEST_CONTEXT, DEFAULT_CONTEXT = 256, 16_384
"""Tokens that all requests together may hold: at least, and unless `n_ctx` says another number."""

SETTINGS = {
    "n_ctx": "context", "n_ubatch": "context", "n_threads": "context", "type_k": "context", "type_v": "context",
    "offload_kqv": "context", "flash_attn": "context",
    "n_gpu_layers": "model", "main_gpu": "model", "use_extra_bufts": "model",
}  # fmt: skip
"""Settings of llama.cpp that may be given, and which of its structures holds them."""

CELL_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
"""What `type_k` and `type_v` may be, with llama.cpp's numbers."""

MOST = 1 << 30

RANGES = {"n_ctx": (SMALLEST_CONTEXT, MOST), "n_threads": (1, 512), "n_gpu_layers": (-1, MOST), "main_gpu": (0, 64)}
"""What whole numbers may be; others would end the process."""

ROW_ARRAYS = {
    "token": (np.int32, ctypes.c_int32), "pos": (np.int32, ctypes.c_int32), "n_seq_id": (np.int32, ctypes.c_int32),
    "seq_id": (np.uint64, ctypes.POINTER(ctypes.c_int32)), "logits": (np.int8, ctypes.c_int8),
}  # fmt: skip
"""The arrays of `llama_batch`, made once: pointers to new ones take longer than a row's numbers."""

SWITCHES = ("offload_kqv", "flash_attn", "use_extra_bufts")

WARNING, ERROR = 3, 4
"""`GGML_LOG_LEVEL_…`."""

log = logging.getLogger(__name__)

_said: list[str] = []
_heard: list[Any] = []


@dataclass(frozen=True, slots=True)
class Rows:
    """What a batch computes: `tokens [rows]`, their `positions`, and to which sequences each belongs."""

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.tokens)


class OutOfCells(MemoryError):
    """The context has no place for so many tokens."""


def library() -> Any:
    """llama.cpp by ctypes. Raises UnsupportedError without llama-cpp-python, or for a version that is not known."""
    try:
        import llama_cpp
        from llama_cpp import llama_cpp as api
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedError(
            f"backend='llama.cpp' needs llama-cpp-python {KNOWN[-1]}, compiled for this machine's devices "
            f"(docs/how-to/llama-cpp.md): {error}"
        ) from error
    if llama_cpp.__version__ not in KNOWN:
        raise UnsupportedError(
            f"precedent-llama-cpp knows llama-cpp-python {', '.join(KNOWN)}, and this is {llama_cpp.__version__}: "
            "install that one, or a newer precedent-llama-cpp"
        )
    return api


class LlamaContext:
    """A GGUF file in llama.cpp. Raises ModelLoadError for a file that it cannot read, ConfigError for a bad setting.

    `num_cells` tokens of all sequences fit in together. Sequences are numbers below `MOST_SEQUENCES`.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self._api = api = library()
        self._layout = {name: settings.get(name) for name in ("type_k", "type_v", "flash_attn")}
        model_params, context_params = api.llama_model_default_params(), api.llama_context_default_params()
        self._set_up(model_params, context_params, settings)
        _listen(api)
        model = api.llama_model_load_from_file(os.fsencode(file), model_params)
        if not model:
            raise ModelLoadError(f"llama.cpp cannot load {file}: {_reason()}")
        self._freed = weakref.finalize(self, api.llama_model_free, model)
        self._check(model, file)
        self.repacks = bool(model_params.use_extra_bufts) and not api.llama_supports_gpu_offload()
        self.trained_context = int(api.llama_model_n_ctx_train(model))
        self.window = int(api.llama_model_n_swa(model))
        """Tokens that layers with a sliding window see; 0 without such layers."""
        if not context_params.n_ctx:
            trained = self.trained_context or DEFAULT_CONTEXT
            context_params.n_ctx = min(max(trained, SMALLEST_CONTEXT), DEFAULT_CONTEXT)
        self._check_memory(model, context_params.n_ctx)
        self._context = api.llama_init_from_model(model, context_params)
        if not self._context:
            raise ModelLoadError(
                f"llama.cpp cannot make a context of {context_params.n_ctx} tokens for {file}: {_reason()}; "
                "give a smaller n_ctx in model_kwargs"
            )
        self._freed.detach()
        self._freed = weakref.finalize(self, _free, api, self._context, model)
        self._memory = api.llama_get_memory(self._context)
        if not self._memory:
            raise UnsupportedError(f"{file} holds no model that writes text token by token, and cannot be a target")
        self.num_cells, self._most_rows = int(api.llama_n_ctx(self._context)), int(api.llama_n_batch(self._context))
        vocabulary = api.llama_model_get_vocab(model)
        self.vocab_size = int(api.llama_vocab_n_tokens(vocabulary))
        self.threads = self._most_threads = int(context_params.n_threads)
        self._rows = {name: np.zeros(BATCH, kind) for name, (kind, _) in ROW_ARRAYS.items()}
        pointers = {name: _pointer(self._rows[name], kind) for name, (_, kind) in ROW_ARRAYS.items()}
        self._batch = api.llama_batch(0, embd=None, **pointers)
        self._views: dict[tuple[int, int], Tensor] = {}

    def _set_up(self, model: Any, context: Any, settings: Mapping[str, Any]) -> None:
        context.n_ctx, context.n_batch, context.n_seq_max, context.kv_unified = 0, BATCH, MOST_SEQUENCES, True
        context.n_threads = torch.get_num_threads()
        model.use_extra_bufts = not has_amx(self._api)
        for name, value in settings.items():
            if name not in SETTINGS:
                raise ConfigError(
                    f"model_kwargs cannot hold {name!r} with backend='llama.cpp'; known: {', '.join(sorted(SETTINGS))}"
                )
            place = "flash_attn_type" if name == "flash_attn" else name
            setattr(model if SETTINGS[name] == "model" else context, place, _number(name, value))
        context.n_threads_batch = context.n_threads

    def _check(self, model: Any, file: Path) -> None:
        api = self._api
        if api.llama_model_has_encoder(model):
            raise UnsupportedError(
                f"{file} is an encoder-decoder model: give its original folder or id, without backend="
            )
        if api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model):
            raise UnsupportedError(
                f"{file} has recurrent layers, from which llama.cpp cannot take rejected tokens back exactly: "
                "leave backend= out"
            )

    def _check_memory(self, model: Any, num_tokens: int) -> None:
        """Refuse a context of which the keys and values alone, in 16 bits, are more than main memory has left.

        Systems promise more memory than they have, and kill the process when it is used.
        """
        api = self._api
        width = api.llama_model_n_head_kv(model) * (api.llama_model_n_embd(model) // api.llama_model_n_head(model))
        wanted, free = 4 * num_tokens * api.llama_model_n_layer(model) * width, free_bytes(torch.device("cpu"))
        if wanted > free and not api.llama_supports_gpu_offload():
            raise ConfigError(
                f"n_ctx={num_tokens} takes about {wanted / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free: "
                "give a smaller n_ctx in model_kwargs"
            )

    @property
    def what(self) -> dict[str, object]:
        """What the numbers of its states depend on, besides the file."""
        system = self._api.llama_print_system_info().decode()
        return {"llama.cpp": KNOWN, "system": system, "cells": self.num_cells, **self._layout}

    def decode(self, rows: Rows, num_logits: int) -> Tensor:
        """Compute and store rows; a view of the logits of the first ones, `[num_logits, vocab_size]`, until the next.

        Raises OutOfCells, or RuntimeError; the caller removes what was stored then.
        """
        count = len(rows)
        if count > self._most_rows:  # llama.cpp would end the process
            raise OutOfCells(f"not enough memory in llama.cpp's context for {count} tokens at once")
        widths = np.array([len(each) for each in rows.sequences])
        numbers = np.array([one for each in rows.sequences for one in each], dtype=np.int32)
        arrays = self._rows
        arrays["token"][:count], arrays["pos"][:count], arrays["n_seq_id"][:count] = rows.tokens, rows.positions, widths
        arrays["seq_id"][:count] = numbers.ctypes.data + 4 * (np.cumsum(widths) - widths)
        arrays["logits"][:count] = 0
        arrays["logits"][:num_logits] = 1
        self._batch.n_tokens = count
        self._fit_threads()
        _said.clear()
        status = self._api.llama_decode(self._context, self._batch)
        if status == 1:
            raise OutOfCells(f"not enough memory in llama.cpp's context of {self.num_cells} tokens")
        if status:
            raise RuntimeError(f"llama_decode returned {status} ({_reason()})")
        return self._logits(num_logits)

    def _logits(self, count: int) -> Tensor:
        if not count:
            return torch.empty(0, self.vocab_size)
        first, last = self._row(0), self._row(count - 1)
        if last - first != 4 * self.vocab_size * (count - 1):
            raise RuntimeError("llama.cpp does not keep the logits of a batch in its order")
        if (first, count) not in self._views:
            numbers = (ctypes.c_float * (count * self.vocab_size)).from_address(first)
            self._views[first, count] = torch.frombuffer(numbers, dtype=torch.float32).view(count, self.vocab_size)
        return self._views[first, count]

    def _fit_threads(self) -> None:
        """Compute with as many threads as other programs leave processors for: llama.cpp's wait for each other too."""
        fitting = TEAM.size(self._most_threads)
        if fitting != self.threads:
            self._api.llama_set_n_threads(self._context, fitting, fitting)
            self.threads = fitting

    def _row(self, place: int) -> int:
        found = self._api.llama_get_logits_ith(self._context, place)
        if not found:
            raise RuntimeError(f"llama.cpp has no logits of row {place} ({_reason()})")
        return int(ctypes.cast(found, ctypes.c_void_p).value or 0)

    def share(self, source: int, other: int, start: int, end: int) -> None:
        """Let another sequence have what a sequence stores from position `start` up to `end`, too."""
        self._api.llama_memory_seq_cp(self._memory, source, other, start, end)

    def remove(self, sequence: int, start: int = 0) -> None:
        """Take what stands from position `start` on away from a sequence."""
        if not self._api.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise RuntimeError(f"llama.cpp cannot take back tokens from position {start} on")

    def state(self, sequence: int) -> NDArray[np.uint8]:
        """A copy of what a sequence stores, in main memory."""
        size = int(self._api.llama_state_seq_get_size(self._context, sequence))
        copied = np.empty(size, dtype=np.uint8)
        written = self._api.llama_state_seq_get_data(self._context, _pointer(copied, ctypes.c_uint8), size, sequence)
        if written != size:
            raise RuntimeError(f"llama.cpp copied {written} of {size} bytes of a sequence")
        return copied

    def set_state(self, sequence: int, state: NDArray[np.uint8]) -> bool:
        """Let an empty sequence store what `state` gave; False if llama.cpp refuses it."""
        state = np.ascontiguousarray(state)
        taken = self._api.llama_state_seq_set_data(
            self._context, _pointer(state, ctypes.c_uint8), state.nbytes, sequence
        )
        return bool(taken == state.nbytes)


def _listen(api: Any) -> None:
    """Keep llama.cpp's words off the terminal: the last errors stay in `_said`, warnings go to the log."""

    def hear(level: int, text: bytes, _: Any) -> None:
        line = text.decode(errors="replace").strip()
        if level == ERROR and line:
            _said[:] = [*_said[-7:], line]
        if level in (WARNING, ERROR) and line:
            log.debug("llama.cpp: %s", line)

    if not _heard:
        _heard.append(api.llama_log_callback(hear))  # llama.cpp keeps no reference
    api.llama_log_set(_heard[0], None)


def _reason() -> str:
    return "; ".join(_said[-2:]) or "it does not say why"


def _number(name: str, value: Any) -> int:
    """A setting as llama.cpp takes it, which would end the process for some others. Raises ConfigError."""
    if name in ("type_k", "type_v"):
        if not isinstance(value, str) or value not in CELL_TYPES:
            raise ConfigError(f"{name}={value!r} is not one of {', '.join(CELL_TYPES)}")
        return CELL_TYPES[value]
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False")
        return int(value)
    least, most = RANGES.get(name, (1, MOST))
    if not is_whole(value) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r} must be a whole number from {least} to {most}")
    return int(value)


def has_amx(api: Any) -> bool:
    """Whether llama.cpp was compiled with AMX, whose kernels are wrong for batches of several sequences, or crash."""
    return b"AMX_INT8 = 1" in api.llama_print_system_info()


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def _free(api: Any, context: Any, model: Any) -> None:
    api.llama_free(context)
    api.llama_model_free(model)
