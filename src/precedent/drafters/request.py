"""A request as one frozen object, from the engine's entry to the drafters and the decode loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precedent.config import SamplingParams
from precedent.text.templates import Template

if TYPE_CHECKING:
    from precedent.sampling.row_shaper import RowShaper
    from precedent.target import Slot


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it.

    `query` is the text that recall embeds; `workflow_step` and `tools` (a fingerprint of the bound tools) distinguish
    requests with similar text. `mode` is the verification mode. The target model cuts every row of logits after
    `num_tokens`, the number of the tokenizer's token ids (None: unknown), and applies `shape` before it samples; a
    draft model must do the same. `prediction` is the caller's guess of the answer; `templates` are premade responses
    and the forms of possible tool calls. `target_slot` returns the request's slot in the target model, for a drafter
    that uses the target's own keys and values: it must not change committed rows, but may write behind them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = "default"
    query: str = ""
    workflow_step: str = ""
    tools: str = ""
    mode: str = "greedy"
    shape: RowShaper | None = None
    num_tokens: int | None = None
    end_token_ids: frozenset[int] = frozenset()
    prediction: tuple[int, ...] = ()
    templates: tuple[Template, ...] = ()
    target_slot: Callable[[], Slot] | None = None
