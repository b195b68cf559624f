"""Decides at load whether a model can run in forwards of fixed size (`cuda.static_runner`), and tests that it does."""

from __future__ import annotations

import torch

from precedent.errors import UnsupportedError
from precedent.runtime.failures import OutOfMemory
from precedent.target.examine import TEXT, observe, tolerance, tree_error
from precedent.target.kv.cache import KVCache
from precedent.target.kv.layer_kinds import FULL_ATTENTION, attention_kinds, has_indexers
from precedent.target.kv.rows import Forward, chain_rows
from precedent.target.kv.shape import KVShape
from precedent.target.runner import Runner
from precedent.testing.host_waits import HostWaits
from precedent_cuda.split_attention import split
from precedent_cuda.static_runner import StaticRunner, StaticSettings


class Hindrance(Exception):
    """Why a model cannot run in fixed sizes, in words that follow "it cannot: "."""


def fixed_sizes(
    runner: Runner, shape: KVShape, settings: StaticSettings, every_rows: int | None = None
) -> StaticRunner:
    """Return a static runner for the model of `runner`, once a test has passed.

    Raises Hindrance for a model that cannot run in fixed sizes.
    """
    _check_settings(runner, settings)
    static = StaticRunner(runner.model, shape, runner.device, settings, every_rows)
    try:
        with runner.using(static):
            _prove(runner, static)
    except Hindrance:
        raise
    except (UnsupportedError, OutOfMemory) as error:
        raise Hindrance(str(error)) from error
    except Exception as misfit:  # what models raise, and what compilers do
        raise Hindrance(f"{type(misfit).__name__}: {misfit}".splitlines()[0]) from misfit
    return static


def _check_settings(runner: Runner, settings: StaticSettings) -> None:
    """Raise Hindrance for what can be known without running the model."""
    others = sorted(attention_kinds(runner.model.config.get_text_config()) - {FULL_ATTENTION})
    devices = {parameter.device for parameter in runner.model.parameters()}
    if settings.capture and runner.device.type != "cuda":
        raise Hindrance(f"CUDA graphs need CUDA devices, and it is on {runner.device.type}")
    if runner.recurrent:
        raise Hindrance("the states of its recurrent layers follow the tree, whose shape differs from step to step")
    if has_indexers(runner.model.config.get_text_config()):
        raise Hindrance(f"the indexers of its {', '.join(others)} layers choose other keys at every step")
    if not runner.packed:
        raise Hindrance("its attention does not go through transformers' attention interface")
    if others:
        raise Hindrance(f"its {', '.join(others)} layers do not see the whole prefix")
    if devices != {runner.device}:
        raise Hindrance("its layers are spread over several devices, or offloaded")


@torch.inference_mode()
def _prove(runner: Runner, static: StaticRunner) -> None:
    """Raise Hindrance if forwards of fixed size compute wrong results.

    Each size is compared three times: it is captured at the second run and only replayed at the third.
    """
    kv = KVCache(static.arena.shape, static.arena)
    kv.reserve(1)
    alone = [chain_rows(kv, TEXT[:1])]
    shape, _ = static.shape_for(alone), static.logits(Forward(alone))
    assert shape is not None
    with HostWaits() as waits:
        static.run(shape, split)  # HostWaits cannot look into compiled attention; the model is what is tested here
    if waits.names:  # checked before any capture: a forward that waits cannot be captured
        raise Hindrance(f"its forward makes the host wait ({waits.reasons})")
    _, expected = observe(runner)
    for _ in range(3):
        before, error = static.forwards, tree_error(runner, lambda: KVCache(static.arena.shape, static.arena), expected)
        if static.forwards != before + 2:
            raise Hindrance("arena_tokens leaves no room for two sequences")
        if error > tolerance(runner.model):
            raise Hindrance(f"a scored tree is {error:.2g} off")
