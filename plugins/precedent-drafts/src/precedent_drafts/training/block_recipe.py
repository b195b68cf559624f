"""How to train a block draft."""

from __future__ import annotations

from dataclasses import dataclass

from precedent.config import check_fields
from precedent_drafts.block_draft import CHAIN, LARGEST, NONE, SMALLEST, TARGET, TREE, holds_block_draft

ENDS = "ends"
"""The start at the target's layers, evenly spaced from first to last."""


@dataclass(frozen=True, slots=True)
class BlockRecipe:
    """How to train a block draft.

    It reads `num_reads` of the target's layers, in their later half, or with `condition` "none" tokens alone, and fills
    `block_size` positions with `num_layers` layers of its own, a head for the `head_tokens` most frequent tokens (0:
    all) and a Markov term of `markov_rank`; of a prompt it sees the last `context_tokens`. A step learns `anchors`
    blocks of each of `batch_texts` texts; a share `filled` of them with some true tokens, which more `iterations` than
    one need. Its layers start as the target's, or as those of the block draft in the folder `start`, with its head.
    Raises ConfigError if a value is out of range.
    """

    num_layers: int = 2
    start: str = ENDS
    num_reads: int = 3
    block_size: int = 8
    head_tokens: int = 8192
    markov_rank: int = 64
    context_tokens: int = 256
    iterations: int = 1
    proposes: str = TREE
    condition: str = TARGET
    temperature: float = 1.0
    answer_tokens: int = 128
    chunk_prompts: int = 16
    batch_texts: int = 4
    anchors: int = 24
    filled: float = 0.0
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("num_layers", 1 <= self.num_layers <= 6, "must lie between 1 and 6"),
            ("start", self.start == ENDS or holds_block_draft(self.start), "must be ends or a block draft's folder"),
            ("num_reads", 1 <= self.num_reads <= 8, "must lie between 1 and 8"),
            ("block_size", SMALLEST <= self.block_size <= LARGEST, f"must lie between {SMALLEST} and {LARGEST}"),
            ("head_tokens", self.head_tokens >= 0, "must be 0 (all) or a number of tokens"),
            ("markov_rank", self.markov_rank >= 1, "must be 1 or more"),
            ("context_tokens", self.context_tokens >= 1, "must be 1 or more"),
            ("iterations", 1 <= self.iterations <= self.block_size, "must lie between 1 and block_size"),
            ("proposes", self.proposes in (TREE, CHAIN), f"must be {TREE} or {CHAIN}"),
            ("condition", self.condition in (TARGET, NONE), f"must be {TARGET} or {NONE}"),
            ("temperature", self.temperature > 0, "must be above 0"),
            ("answer_tokens", self.answer_tokens >= 1, "must be 1 or more"),
            ("chunk_prompts", self.chunk_prompts >= 1, "must be 1 or more"),
            ("batch_texts", self.batch_texts >= 1, "must be 1 or more"),
            ("anchors", self.anchors >= 1, "must be 1 or more"),
            ("filled", 0 <= self.filled <= 1, "must lie between 0 and 1"),
            ("learning_rate", self.learning_rate > 0, "must be above 0"),
        )
        check_fields(self, checks)

    def reads(self, num_layers: int) -> tuple[int, ...]:
        """The layers that the draft reads, counted from 1, of a target with so many.

        Evenly spaced from the middle to a tenth before the last: later layers say more about what comes next.
        """
        if self.condition == NONE:
            return ()
        first, last = -(-num_layers // 2), num_layers - num_layers // 10
        gap = (last - first) / max(1, self.num_reads - 1)
        return tuple(sorted({round(last - place * gap) for place in range(self.num_reads)}))
