"""What was asked: one frozen object, from the engine's door to the drafters and the decode loop."""

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
    """A prompt and how it is to be answered.

    `query` is the text that recall embeds; `workflow_step` and `tools` (a fingerprint of the bound tools) tell requests
    apart whose words are alike. `mode` is how tokens are verified. The target model cuts a row of logits after
    `num_tokens`, the number of token ids that the tokenizer has (None: unknown), and applies `shape` to it before it
    samples; a draft model must do the same. `prediction` is the caller's own guess of the answer, `templates` are
    premade responses and the forms of the tool calls that it may make. `target_slot` gives the request's place in the
    target model, for a drafter that uses the target's own keys and values: committed rows must stay, rows behind them
    may be written.
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
