"""What a block draft's folder says of itself: `config.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from precedent.errors import ModelLoadError

SETTINGS_FILE = "config.json"

KIND, FORMAT = "precedent-block-draft", 1
"""Increase the format whenever an older version of this file could not read the folder."""

SMALLEST, LARGEST = 2, 16
"""Sizes of a block."""

TARGET, NONE = "target", "none"
"""What a draft reads of the text: outputs of the target's layers, or its tokens alone, through layers of its own."""

TREE, CHAIN = "tree", "chain"
"""What a draft proposes: its best candidates with estimates, or a chain sampled with its distributions."""


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """Which target a block draft belongs to, its shape, and how it is used.

    `target` is a readable name, `embeddings` and `layers` are fingerprints of the target's weights. The draft reads the
    last `context_tokens` tokens of a prompt and all of the answer: the outputs of the target's layers `reads` (counted
    from 1), or with `condition` "none" the tokens alone. It fills `block_size` positions behind the last token. It has
    `num_layers` layers of the given shape, a head for `num_head_tokens` tokens, and a term of `markov_rank` between
    neighbours (0: none). `iterations` forwards fill one block; `proposes` is "tree" or "chain". Raises ModelLoadError
    for values out of range.
    """

    target: str
    embeddings: str
    layers: str
    reads: tuple[int, ...]
    hidden_size: int
    num_head_tokens: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    num_layers: int = 2
    block_size: int = 8
    context_tokens: int = 256
    markov_rank: int = 64
    iterations: int = 1
    proposes: str = TREE
    condition: str = TARGET
    kind: str = KIND
    format: int = FORMAT

    def __post_init__(self) -> None:
        checks = (
            ("condition", self.condition in (TARGET, NONE), f"must be {TARGET} or {NONE}"),
            ("block_size", SMALLEST <= self.block_size <= LARGEST, f"must lie between {SMALLEST} and {LARGEST}"),
            ("iterations", 1 <= self.iterations <= self.block_size, "must lie between 1 and block_size"),
            ("proposes", self.proposes in (TREE, CHAIN), f"must be {TREE} or {CHAIN}"),
            ("reads", [*self.reads] == sorted({*self.reads}), "must name layers, in order"),
            ("reads", bool(self.reads) == (self.condition == TARGET), f"does not fit the condition {self.condition}"),
            ("num_layers", self.num_layers >= 1, "must be 1 or more"),
            ("context_tokens", self.context_tokens >= 1, "must be 1 or more"),
            ("markov_rank", self.markov_rank >= 0, "must be 0 or more"),
        )
        for name, right, says in checks:
            if not right:
                raise ModelLoadError(f"{name} of a block draft is {getattr(self, name)!r} and {says}")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The settings in a folder. Raises ModelLoadError if this version does not understand them."""
        try:
            found: dict[str, Any] = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
            if (found["kind"], found["format"]) != (KIND, FORMAT):
                raise ModelLoadError(
                    f"{folder} holds a {found['kind']} of format {found['format']}, and this reads {KIND} {FORMAT}: "
                    "train it again"
                )
            return cls(**{**found, "reads": tuple(found["reads"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelLoadError(
                f"{folder / SETTINGS_FILE} cannot be read ({error!r}); train the draft again"
            ) from error

    def write(self, folder: Path) -> None:
        """Write the settings atomically."""
        partial = folder / f"{SETTINGS_FILE}.partial"
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / SETTINGS_FILE)


def holds_block_draft(place: str | Path) -> bool:
    """Whether `place` is a folder of a block draft."""
    try:
        found = json.loads((Path(place).expanduser() / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == KIND
