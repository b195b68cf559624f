"""Examines a model at load: what its layers store, and whether a scored tree equals plain forwards.

An architecture may keep state between tokens, ignore masks or positions, or mix rows, and no config says so. So every
model scores one small tree when it is loaded, and a model that gets it wrong is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import UnsupportedError
from precedent.target.kv.cache import KVCache
from precedent.target.kv.layer_kinds import MISFITS, why_only_chains
from precedent.target.kv.rows import ForwardPass, chain_rows, tree_rows
from precedent.target.kv.shape import KVShape, ShapeObserver
from precedent.target.quantised import is_quantised
from precedent.target.runner import Runner, use_tree_attention
from precedent.target.support import LayerState
from precedent.tree import ROOT, TreeBuilder, chain

TEXT = (0, 1, 1, 0, 1)
"""Token ids of the examination, valid in any vocabulary: two prompt tokens, the pending one, two of a path."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Accepted relative difference between a scored tree and plain forwards; wrong masks or positions give about 1."""

LOW_PRECISION = 0.25
"""The same for bfloat16, float16 and quantised weights. A larger difference is logged: it may still be rounding."""

SURELY_WRONG = 0.5
"""A larger difference is not rounding in any precision, not even for a token that was routed to another expert."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


@torch.inference_mode()
def examine(model: PreTrainedModel, layer_state: LayerState) -> tuple[Runner, KVShape, int]:
    """Observe a model; returns how to run it, what its layers store, and the size of its vocabulary.

    Raises UnsupportedError, naming the model, when a tree cannot be scored.
    """
    known = layer_state.adapt(model) or why_only_chains(model.config.get_text_config())
    packings = [] if known else [True] * use_tree_attention(model, layer_state.packs) + [False]
    trees = [Runner(model, packed=packed, layer_state=layer_state) for packed in packings]
    only_chains = known or "its forward pass cannot score candidate trees"
    paths = Runner(model, packed=False, only_chains=only_chains, layer_state=layer_state)
    shape, expected = attempt(model, lambda: observe(paths))
    for runner in trees:
        try:
            error = tree_error(runner, lambda: KVCache(shape), expected)
            if error <= (_most(runner) if runner is trees[-1] else tolerance(model, layer_state)):
                return _examined(runner, error, shape, expected)
            log.warning("%s runs in a slower way: %s is %.2g off plain text", type(model).__name__, runner.way, error)
        except torch.OutOfMemoryError:
            raise
        except MISFITS as misfit:
            log.debug("%s runs in a slower way: %r", type(model).__name__, misfit)
    error = attempt(model, lambda: tree_error(paths, lambda: KVCache(shape), expected))
    return _examined(paths, error, shape, expected)


def check_error(runner: Runner, error: float) -> None:
    """Raise UnsupportedError if a scored tree is further off plain forwards than rounding; log what may be rounding."""
    model = runner.model
    if error > _most(runner):
        raise _unfit(model, f"a scored tree is {error:.2g} off")
    if error > tolerance(model, runner.layer_state):
        log.warning("%s: a scored tree is %.2g off plain forwards; try it in float32", type(model).__name__, error)


def _most(runner: Runner) -> float:
    accepted = tolerance(runner.model, runner.layer_state)
    return SURELY_WRONG if accepted == LOW_PRECISION else accepted


def _examined(runner: Runner, error: float, shape: KVShape, expected: Tensor) -> tuple[Runner, KVShape, int]:
    """The result, whose shape has the state of layers that have one, as a forward of `TEXT` leaves it."""
    check_error(runner, error)
    if runner.layer_state.stateful:
        kv = KVCache(shape)
        runner.logits([tree_rows(kv, TEXT[0], chain(TEXT[1:]))])
        kept = -(-kv.state.kept_bytes // len(TEXT))
        kv.keep(range(len(TEXT)))
        shape = replace(shape, state=replace(kv.state.shape, kept_bytes=kept))
    return runner, shape, expected.shape[-1]


def attempt(model: PreTrainedModel, action: Callable[[], Result]) -> Result:
    """Run an action; any error other than out of memory means that this model is not supported."""
    try:
        return action()
    except torch.OutOfMemoryError:
        raise
    except MISFITS as misfit:
        raise _unfit(model, f"{type(misfit).__name__}: {misfit}".splitlines()[0]) from misfit


def _unfit(model: PreTrainedModel, reason: str) -> UnsupportedError:
    name = model.config.get_text_config().model_type
    return UnsupportedError(
        f"{name} cannot be the target: with our KV cache its forward pass computes neither candidate trees nor single "
        f"paths as it does plain text ({reason})"
    )


def observe(runner: Runner) -> tuple[KVShape, Tensor]:
    """What a forward stores in each layer, and the logits of `TEXT`, `[tokens, vocab_size]`."""
    state, model = runner.layer_state, runner.model
    text = model.config.get_text_config()
    observer = ShapeObserver(int(text.num_hidden_layers), state.observer_layer)
    token_ids = torch.tensor([TEXT], device=runner.device)
    if state.stateful:  # modules that have a state get ours, and the observer the keys and values beside it
        kv = KVCache(KVShape((), state=state.state))
        forward = ForwardPass([chain_rows(kv, TEXT)])
        forward.cache = observer
        with state.running(forward):
            model(**runner.inputs(forward))
        kv.keep(range(len(TEXT)))
        if not kv.state.nbytes:
            raise ValueError("its recurrent layers do not use transformers' cache")
        logits: Tensor = model(input_ids=token_ids, use_cache=False).logits
    else:
        logits = model(input_ids=token_ids, past_key_values=observer, use_cache=True).logits
        if not any(observer.shape.layers):
            raise UnsupportedError(
                f"{text.model_type} has no KV cache, so every step would compute the whole text again"
            )
    return replace(observer.shape, state=state.state), logits[0]


def tree_error(runner: Runner, new_kv: Callable[[], KVCache], expected: Tensor, text: tuple[int, ...] = TEXT) -> float:
    """The largest relative difference between `score_text` and `expected [tokens, vocab_size]`."""
    found = score_text(runner, new_kv, text)
    return max(relative(row.float(), expected[place].float()) for place, row in found)


def score_text(runner: Runner, new_kv: Callable[[], KVCache], text: tuple[int, ...] = TEXT) -> list[tuple[int, Tensor]]:
    """Score the end of `text` as a path with a sibling in its way, beside another sequence.

    Returns logits, each with the place in `text` of the token that they follow.
    """
    long, short, builder = new_kv(), new_kv(), TreeBuilder()
    runner.logits([chain_rows(long, text[:2]), chain_rows(short, text[:1])])
    long.keep(range(2))
    short.keep(range(1))
    if not runner.only_chains:
        builder.add_fixed(ROOT, text[1], "examination")  # which the path must not see
    node = builder.add_fixed(ROOT, text[3], "examination")
    builder.add_fixed(node, text[4], "examination")
    path = [0, node + 1, node + 2]
    scored, beside = runner.logits([tree_rows(long, text[2], builder.build()), chain_rows(short, text[1:3])])
    found = [*zip((2, 3, 4), scored[path], strict=True), *zip((1, 2), beside, strict=True)]
    if runner.layer_state.stateful:  # the state after an accepted path
        long.keep(path[:2])
        found.append((4, runner.logits([chain_rows(long, text[4:])])[0][0]))
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    """Distance between two rows of logits relative to their spread; infinite where only one of them is finite."""
    found, finite = found.to(expected.device), expected.isfinite()  # ids that a draft model lacks have -inf
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    found, expected = found[finite], expected[finite]
    spread = (expected - expected.mean()).norm().clamp(min=torch.finfo(expected.dtype).tiny)
    return float((found - expected).norm() / spread)


def tolerance(model: PreTrainedModel, layer_state: LayerState) -> float:
    """The relative difference that rounding may cause in a correct forward of this model."""
    if getattr(model.config, "quantization_config", None) is not None or is_quantised(model):
        return LOW_PRECISION
    in_float32 = model.dtype == torch.float64 and layer_state.stateful
    return TOLERANCE.get(torch.float32 if in_float32 else model.dtype, LOW_PRECISION)
