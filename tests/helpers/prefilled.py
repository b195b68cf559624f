"""Prefilled sequences and trees to verify, as on a GPU, where a step reads once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.packages import graph_settings
from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.proposal import Proposal
from precedent.decoding.sequence import DecodingSequence
from precedent.decoding.verification import Forward, Verified
from precedent.drafters.prompt import PromptDrafter
from precedent.drafters.request import Request
from precedent.grammar import GrammarConstraint
from precedent.grammar.guidance import Words
from precedent.planning.costs import CostCurve
from precedent.planning.planner import Planner
from precedent.sampling.constraints import constraints_for
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import entropy_rng
from precedent.sampling.row_shaper import RowShaper
from precedent.target import TargetModel
from precedent.tree import ROOT, CandidateTree, TreeBuilder
from precedent_testing.tiny_models import tiny_causal_lm

VOCABULARY = 40
END = 0
PROMPT = [5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7]
"""Repeats itself, so that the prompt drafter has something to propose."""


def sequences(
    target: TargetModel,
    sampling: SamplingParams,
    count: int,
    num_tokens: int | None = None,
    shape_of: Callable[[], RowShaper | None] = lambda: None,
    *,
    mode: str = "",
    bitwise: bool = False,
) -> list[DecodingSequence]:
    """Prefilled, with drafts from their own prompts."""
    found = []
    mode = mode or ("greedy" if sampling.greedy else "traversal" if sampling.seed is None else "coupled")
    for number in range(count):
        slot = target.new_slot()
        target.prefill(slot, [*PROMPT[number:], 12 + number, *PROMPT])
        request = Request(
            "test", tuple(PROMPT), sampling, mode=mode, shape=shape_of(), num_tokens=num_tokens,
            end_token_ids=frozenset({END}),
        )  # fmt: skip
        sessions = {"prompt": PromptDrafter().begin(request)}
        sequence = DecodingSequence(request, slot, 40, entropy_rng(number), bitwise=bitwise, sessions=sessions)
        found.append(sequence)
    return found


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("precedent_cuda.support.on_gpu", lambda pending: True)


def noting_probabilities(patch: pytest.MonkeyPatch, note: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Call `note` with the logits and the probabilities whenever the target's rows are normalised."""

    def noted(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        found = probs_of(logits, params)
        note(logits, found)
        return found

    for module in ("precedent.sampling.target_rows", "precedent_cuda.ahead"):
        patch.setattr(f"{module}.probs_of", noted)


def static_target(device: str = "cpu") -> TargetModel:
    model = tiny_causal_lm(dtype=torch.float64).to(device)
    return TargetModel(model, cuda_graphs=graph_settings(arena_tokens=4096, capture=device == "cuda"))


def verified(proposals: Sequence[Proposal], logits: Sequence[torch.Tensor]) -> list[Verified]:
    """The verdicts on proposals whose rows are given."""
    forward = Forward(list(zip(proposals, logits, strict=True)), 0.0, num_tries=1)
    return DecodeLoop(static_target(), Planner(CostCurve())).verify(forward)


def fixed_tree(seed: int) -> CandidateTree:
    """A chain and its siblings, as memory proposes them."""
    generator, builder, node = torch.Generator().manual_seed(seed), TreeBuilder(), ROOT
    for _ in range(4):
        likely, other = torch.randperm(6, generator=generator)[:2].tolist()
        builder.add_fixed(node, other, "cache")
        node = builder.add_fixed(node, likely, "cache")
    return builder.build()


class EvenIds:
    """Even and odd ids in turns."""

    def __init__(self) -> None:
        self._taken = 0

    def allowed(self) -> Words:
        return np.full(8, 0x55555555 << self._taken % 2, dtype=np.uint32).view(np.int32)

    def advance(self, token_ids: Sequence[int]) -> int:
        for number, token in enumerate(token_ids):
            if token % 2 != self._taken % 2:
                return number
            self._taken += 1
        return len(token_ids)

    def go_back(self, num_tokens: int) -> None:
        self._taken -= num_tokens

    def forced(self) -> list[int]:
        return []


def grammar_and_penalties(prompt_ids: Sequence[int]) -> RowShaper:
    """The grammar, a bias and all penalties."""
    params = SamplingParams(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={4: 1, 5: -1}
    )
    found = constraints_for(params, prompt_ids, GrammarConstraint(EvenIds(), [0]))
    assert found is not None
    return found


class Operations(TorchDispatchMode):
    """Notes every operation inside: all `names`, and the `launched`, which compute or copy something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.names: list[str] = []
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.append(name)
        if not func.is_view and "empty" not in name:
            self.launched.append(name)
        return func(*args, **(kwargs or {}))
