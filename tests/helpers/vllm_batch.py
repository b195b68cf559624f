"""What vLLM 0.32's model runner hands a drafter: slots, requests by their ids, arrays longer than the batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from helpers.services import END
from precedent_vllm.engine import Vllm
from precedent_vllm.note import Note, seal

SLOTS, CONTEXT = 8, 64

SECRET = b"of this server"


ORDER = [40, 41, 42, 43, 44, 45, END]
REFUND = [50, 51, 52, 53, 54, END]
NORTH = seal(Note(tenant="north", query="an order"), SECRET)
SOUTH = seal(Note(tenant="south", query="an order"), SECRET)


class FakeVllm(Vllm):
    """A vLLM whose workers hold no model; it notes what was asked of it."""

    def __init__(self, version: str = "0.32.0") -> None:
        self.said, self.checked, self.handed_to = version, 0, list[Any]()

    def version(self) -> str:
        return self.said

    def check_rejection_sampler(self) -> None:
        self.checked += 1

    def hand_over_runner(self, drafter: Any) -> None:
        self.handed_to.append(drafter)


def config(rank: int = 0, tp: int = 1, pp: int = 1, tokens: int = 8) -> Any:
    """The part of vLLM's configuration that a drafter reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(tokenizer="", max_model_len=CONTEXT),
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        parallel_config=SimpleNamespace(
            rank=rank, world_size=tp * pp, tensor_parallel_size=tp, prefill_context_parallel_size=1
        ),
    )


class FakeRunner:
    """Keeps requests in slots as `GPUModelRunner` does; `step` is one of its steps."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_tokens_no_spec=np.zeros(SLOTS, dtype=np.int32),
            token_ids_cpu=np.full((SLOTS, CONTEXT), -7, dtype=np.int32),  # what is behind a row's end is old rubbish
        )
        self.requests: dict[str, Any] = {}

    def add(
        self, req_id: str, prompt: Sequence[int] | None, note: Any = None, max_tokens: int = 50, **how: Any
    ) -> None:
        """A request that runs from now on."""
        params = SimpleNamespace(
            max_tokens=max_tokens,
            all_stop_token_ids={2},  # the model's end is in it whether or not it is ignored
            stop_token_ids=[],
            extra_args=None if note is None else {"precedent": note},
            **how,
        )
        self.requests[req_id] = SimpleNamespace(
            prompt_token_ids=None if prompt is None else list(prompt), output_token_ids=[], sampling_params=params
        )
        self.input_batch.req_ids.append(req_id)

    def finish(self, req_id: str) -> None:
        """A request that vLLM forgets; the last slot's request moves into its place."""
        ids = self.input_batch.req_ids
        place, last = ids.index(req_id), ids.pop()
        if last != req_id:
            ids[place] = last
        del self.requests[req_id]

    def preempt(self, req_id: str) -> None:
        """A request that waits from now on: it leaves the batch, and vLLM still knows it."""
        self.input_batch.req_ids.remove(req_id)

    def swap(self, one: int, other: int) -> None:
        """Two requests change slots."""
        ids = self.input_batch.req_ids
        ids[one], ids[other] = ids[other], ids[one]

    def step(self, drafter: Any, sampled: dict[str, list[int]], **how: Any) -> dict[str, list[int]]:
        """Append what was sampled to each request, ask for drafts and return them by request."""
        batch, kind = self.input_batch, how.get("kind", list)
        for row, req_id in enumerate(batch.req_ids):
            request = self.requests[req_id]
            request.output_token_ids += sampled.get(req_id, [])
            whole = [*(request.prompt_token_ids or []), *request.output_token_ids]
            batch.token_ids_cpu[row, : len(whole)], batch.num_tokens_no_spec[row] = whole, len(whole)
        new = [kind(sampled.get(req_id, [])) for req_id in batch.req_ids]
        drafter.runner = self
        drafts = drafter.propose(new, batch.num_tokens_no_spec, batch.token_ids_cpu, slot_mappings=None)
        assert len(drafts) == len(new)
        assert all(type(draft) is list and all(type(token) is int for token in draft) for draft in drafts)
        return dict(zip(batch.req_ids, drafts, strict=True))
