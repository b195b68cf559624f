"""A step on a device that only exists in torch's types: nothing may be read from it, and nothing from a CPU meet it.

    python plugins/precedent-cuda/tests/elsewhere_program.py

Tensors have sizes, types and a device, and no numbers. An operation between two devices raises an error, and so does
whatever would make the host wait. Run in a process of its own, for torch knows one such device and never forgets it.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.utils import backend_registration

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.request import Request
from precedent.grammar import GrammarConstraint
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.runtime.placing import placed
from precedent.sampling.constraints import constraints_for
from precedent.sampling.rng import CounterRng, entropy_rng
from precedent.sampling.row_shaper import RowShaper
from precedent.sampling.target_rows import TargetRows
from precedent.target import TargetModel
from precedent.target.kv.shape import KVShape
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Pending
from precedent_cuda import StaticSettings, ahead, support
from precedent_cuda.ahead import Ahead
from precedent_cuda.static_runner import StaticRunner
from precedent_testing.tiny_models import tiny_causal_lm

NAME = "elsewhere"
VOCABULARY = 259
MODES = {
    "greedy": SamplingParams(),
    "traversal": SamplingParams(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01),
    "coupled": SamplingParams(temperature=0.7, seed=3),
}


class AnyToken:
    """A grammar that allows everything."""

    def allowed(self) -> NDArray[np.int32]:
        return np.full((VOCABULARY + 31) // 32, -1, dtype=np.int32)

    def advance(self, token_ids: Any) -> int:
        return len(token_ids)

    def go_back(self, num_tokens: int) -> None:
        pass

    def forced(self) -> list[int]:
        return []


def without_them(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """What `placed` gives, elsewhere without the numbers."""
    if device.type == "cpu":
        return placed(numbers, device)
    return torch.empty(numbers.shape, dtype=torch.from_numpy(numbers[:0]).dtype, device=device)


def elsewhere(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device=NAME)


def read_nothing(pending: Sequence[Ahead]) -> None:
    """What `read_together` does, with zeros for all numbers."""
    for each in pending:
        each.take([0.0] * each.numbers.numel())


@contextmanager
def without_numbers() -> Iterator[None]:
    """Inside, tensors have no numbers, `placed` puts none anywhere, and the one read of a step brings zeros."""
    modules = [module for name, module in sys.modules.items() if name.startswith(("precedent.", "precedent_cuda."))]
    with FakeTensorMode(allow_non_fake_inputs=False), torch.inference_mode(), ExitStack() as patches:
        for module in modules:
            if "placed" in vars(module):
                patches.enter_context(patch.object(module, "placed", without_them))
        patches.enter_context(patch.object(ahead, "read_together", read_nothing))
        patches.enter_context(patch.object(support, "on_gpu", lambda pending: True))
        patches.enter_context(patch.object(ahead, "DURING_A_FORWARD", math.inf))
        yield


def target(every_rows: int | None, model_type: str) -> TargetModel:
    """A tiny model elsewhere, in forwards of fixed size; `without_numbers` is to be entered first."""
    with unset_fake_temporarily():
        found = TargetModel(tiny_causal_lm(model_type))
    for module in found.model.modules():
        for name, weight in module.named_parameters(recurse=False):
            module._parameters[name] = torch.nn.Parameter(elsewhere(*weight.shape, dtype=weight.dtype), False)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = elsewhere(*buffer.shape, dtype=buffer.dtype)
    device = torch.device(NAME)
    layers = [None if layer is None else dataclasses.replace(layer, device=device) for layer in found.kv_shape.layers]
    found.kv_shape = KVShape(tuple(layers))
    settings = StaticSettings(arena_tokens=4096, capture=False)
    found.runner.backends = [StaticRunner(found.model, found.kv_shape, device, settings, every_rows)]
    return found


def running(model: TargetModel, mode: str, shape: RowShaper | None) -> DecodingSequence:
    """A prefilled sequence that drafts from its own prompt."""
    prompt = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]
    slot = model.new_slot()
    model.prefill(slot, prompt)
    request = Request("test", tuple(prompt), MODES[mode], mode=mode, shape=shape, end_token_ids=frozenset({258}))
    return DecodingSequence(request, slot, 40, entropy_rng(1), sessions={"prompt": PromptDrafter().begin(request)})


def constraints() -> RowShaper | None:
    """A grammar, a bias and all penalties."""
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={4: 1, 5: -1}
    )
    return constraints_for(params, [1, 2], GrammarConstraint(AnyToken(), [258]))


def steps(mode: str, shape: RowShaper | None, every_rows: int | None = None, model_type: str = "llama") -> None:
    """Two steps of two sequences: forwards, trees, verdicts and commits."""
    model, planner = target(every_rows, model_type), Planner(CostCurve())
    sequences = [running(model, mode, shape) for _ in range(2)]
    for _ in range(2):
        DecodeLoop(model, planner).step(sequences)
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
    assert model.runner.backends[0].forwards >= 2
    assert sum(sequence.stats.num_draft_tokens for sequence in sequences) > 0


def tree(num_samples: int) -> CandidateTree:
    """Fixed candidates, samples beside and below them, excluded siblings."""
    builder, node = TreeBuilder(), ROOT
    fixed = builder.add_fixed(ROOT, 1, "cache")
    builder.add_sampled(fixed, 2, Sampled(elsewhere(VOCABULARY)), "draft")
    for token in range(3, 3 + num_samples):
        node = builder.add_sampled(node, token, Sampled(elsewhere(VOCABULARY), builder.children(node)), "draft")
    return builder.build()


def samples(mode: str) -> None:
    """Trees with samples of a draft model."""
    rng, found = CounterRng(1, 1), []
    for _ in range(2):
        for each in (tree(2), tree(3)):
            logits = elsewhere(len(each) + 1, VOCABULARY, dtype=torch.bfloat16)
            found.append(Pending(TargetRows(logits, each, MODES[mode], (5,), constraints()), rng, mode))
    ahead.verify_ahead(found)
    assert all(each.ahead is not None and each.verdict().next_token == 0 for each in found)


def control(forbidden: Callable[[], object], error: type[Exception]) -> None:
    """What the program is to find, it finds."""
    try:
        forbidden()
    except error:
        return
    raise AssertionError("nothing was found")


SCENES: dict[str, Callable[[], None]] = {
    **{f"step {mode}": partial(steps, mode, None) for mode in MODES},
    **{f"step {mode}, constrained": partial(steps, mode, constraints()) for mode in ("greedy", "traversal")},
    "step in one size": partial(steps, "greedy", None, 64),
    "step of phi3": partial(steps, "greedy", None, model_type="phi3"),
    **{f"samples {mode}": partial(samples, mode) for mode in MODES},
    "control: a number is read": partial(control, lambda: float(elsewhere(1)), DataDependentOutputException),
    "control: two devices meet": partial(control, lambda: elsewhere(2) + torch.ones(2), RuntimeError),
}


def main() -> None:
    """Print each scene, and what went wrong in it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    for name, scene in SCENES.items():
        try:
            with without_numbers():
                scene()
            print(f"{name}: fine")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
            if "-v" in sys.argv:
                traceback.print_exception(error)


if __name__ == "__main__":
    main()
