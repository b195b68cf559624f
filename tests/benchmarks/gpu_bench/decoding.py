"""Plain decoding, ours and transformers' own ways, on the same random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch

from gpu_bench.setting import Setting
from gpu_bench.steps import lengths
from precedent.target import TargetModel
from precedent.tree import EMPTY_TREE

Row = dict[str, Any]


def decoding_rates(setting: Setting) -> Iterator[Row]:
    """Tokens per second of each way, prefill left out; each fails alone."""
    ways: dict[str, Callable[[Setting, int], tuple[int, float]]] = {
        "ours, graphs": lambda given, tokens: plainly(given, given.static, tokens),
        "ours, ordinary forwards": lambda given, tokens: plainly(given, given.plain, tokens),
        "transformers, eager": generated,
        "transformers, static cache, compiled": compiled,
        "transformers, prompt lookup": lambda given, tokens: generated(given, tokens, prompt_lookup_num_tokens=10),
    }
    tokens = 8 if setting.small else 128
    for name, way in ways.items():
        setting.check_time()
        try:
            made, seconds = way(setting, tokens)
            yield {
                "way": name,
                "tokens": made,
                "tokens_per_second": made / seconds,
                "ms_per_token": 1e3 * seconds / made,
            }
        except Exception as error:
            yield {"way": name, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}


def plainly(setting: Setting, target: TargetModel, tokens: int) -> tuple[int, float]:
    """Greedy, one token after the other, each read back as an engine must; a first run of equal length warms up."""
    taken = []
    for _ in range(2):
        slot = setting.slot_of(target, lengths(setting)[0], tokens)
        setting.wait()
        started = perf_counter()
        for _ in range(tokens):
            token = int(target.plain_step(slot)[0].argmax())
            target.commit(slot, EMPTY_TREE, (), token)
        taken.append(perf_counter() - started)
    return tokens, taken[-1]


def generated(setting: Setting, tokens: int, **settings: Any) -> tuple[int, float]:
    """`generate`, greedy; the time of a short answer to the same prompt is taken off as prefill.

    Under prompt lookup the random weights decide what is accepted: it shows what its steps cost, not what it gains.
    """
    model, before = setting.model, setting.model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        prompt = torch.randint(0, 400, (1, lengths(setting)[0]), device=setting.device)
        first = _seconds_to_generate(setting, prompt, 2, settings)
        whole = _seconds_to_generate(setting, prompt, tokens + 2, settings)
        return tokens, max(whole - first, 1e-9)
    finally:
        model.set_attn_implementation(before)


def compiled(setting: Setting, tokens: int) -> tuple[int, float]:
    """A static cache, which transformers compiles for by itself on CUDA."""
    return generated(setting, tokens, cache_implementation="static")


def _seconds_to_generate(setting: Setting, prompt: torch.Tensor, tokens: int, settings: dict[str, Any]) -> float:
    taken = []
    for _ in range(2):  # the first one warms up, and compiles
        setting.wait()
        started = perf_counter()
        setting.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0, **settings,
        )  # fmt: skip
        setting.wait()
        taken.append(perf_counter() - started)
    return taken[-1]
