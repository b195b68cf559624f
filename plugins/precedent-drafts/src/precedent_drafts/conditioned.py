"""A trained draft that also reads hidden states of its target: layers behind a fusion of both (EAGLE, 2401.15077).

At position i it reads the embedding of token i + 1 and the target's final hidden state of token i, and predicts token
i + 2; behind the committed text its own output takes the place of the hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from precedent.errors import ModelLoadError
from precedent.target.load.first_layers import base_of
from precedent_drafts.borrowed import check_on_one_device
from precedent_drafts.head import GivenStates
from precedent_drafts.trained import draft_beside

FUSION = "fusion."
"""How the names of a fusion's weights begin in a draft's folder."""

LINEAR, TOKEN_GUIDED = "linear", "token-guided"
FUSIONS = (LINEAR, TOKEN_GUIDED)
"""How a draft fuses its inputs: EAGLE's linear map, or GRIFFIN's with a correction (2502.11018)."""

EPSILON = 1e-6


class LinearFusion(nn.Module):
    """`W [e; f]` of an embedding e and a hidden state f; with new weights it is e."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.map_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        with torch.no_grad():
            self.map_proj.weight.copy_(torch.eye(hidden_size, 2 * hidden_size))

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Both `[..., hidden_size]` to one."""
        found: Tensor = self.map_proj(torch.cat([embedded, hidden], dim=-1))
        return found


class TokenGuidedFusion(LinearFusion):
    """`W [e; f] + D silu(U [norm f; e])`: the token corrects what a drafted hidden state got wrong."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)
        self.norm = nn.RMSNorm(hidden_size, eps=EPSILON)
        self.up_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Both `[..., hidden_size]` to one."""
        guided: Tensor = self.up_proj(torch.cat([self.norm(hidden), embedded], dim=-1))
        corrected: Tensor = self.down_proj(nn.functional.silu(guided))
        return super().forward(embedded, hidden) + corrected


class ConditionedInputs(GivenStates):
    """Stands in for the embeddings of a conditioned draft."""

    def __init__(self, embeddings: nn.Module, fusion: LinearFusion) -> None:
        super().__init__(embeddings)
        self.fusion = fusion

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The fusion of both inputs, in its dtype."""
        dtype = self.fusion.map_proj.weight.dtype
        found: Tensor = self.fusion(embedded.to(dtype), states.to(dtype))
        return found


def fusion_of(kind: str, hidden_size: int) -> LinearFusion:
    """A fusion with new weights, of torch's global generator. Raises ModelLoadError for an unknown kind."""
    if kind not in FUSIONS:
        raise ModelLoadError(f"the draft fuses its inputs in a way that this version does not know: {kind!r}")
    return LinearFusion(hidden_size) if kind == LINEAR else TokenGuidedFusion(hidden_size)


def reads_hidden_states(model: Any) -> bool:
    """Whether a draft model reads its target's hidden states."""
    return isinstance(model, PreTrainedModel) and isinstance(model.get_input_embeddings(), ConditionedInputs)


def conditioned_beside(
    target: PreTrainedModel,
    initial_layers: Sequence[int],
    fusion: LinearFusion,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """A draft from its layers' weights and a fusion, with the target's embeddings and head; see `draft_beside`.

    Raises UnsupportedError for a target that is spread over devices.
    """
    check_on_one_device(target, "a draft that reads hidden states")
    draft = draft_beside(target, initial_layers, weights, dtype)
    base: Any = base_of(draft)
    base.embed_tokens = ConditionedInputs(base.embed_tokens, fusion.to(target.device, dtype or target.dtype)).eval()
    return draft


def fusion_from(kind: str, target: PreTrainedModel, weights: Mapping[str, Tensor]) -> LinearFusion:
    """A fusion with the weights of a draft's folder. Raises ModelLoadError for weights that do not fit."""
    own = {name.removeprefix(FUSION): tensor for name, tensor in weights.items() if name.startswith(FUSION)}
    try:
        with torch.device("meta"):
            fusion = fusion_of(kind, target.config.get_text_config().hidden_size)
        fusion.load_state_dict(own, assign=True)
    except RuntimeError as error:
        raise ModelLoadError(f"the weights of the fusion do not fit: {' '.join(str(error).split())}") from error
    return fusion
