"""How to train a block draft, and the plan of one training; both lie in its folder until it ends."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from precedent.config import check_fields
from precedent.errors import ConfigError
from precedent.target.block.settings import CHAIN, LARGEST, SMALLEST, TREE
from precedent.training.schedule import COLLECTING_SHARE, PLAN_FILE


@dataclass(frozen=True, slots=True)
class BlockRecipe:
    """How to train a block draft.

    It reads `num_reads` of the target's layers, evenly spaced, and fills `block_size` positions with `num_layers`
    layers of its own, a head for the `head_tokens` most frequent tokens (0: all) and a Markov term of `markov_rank`;
    of a prompt it sees the last `context_tokens`. A step learns `anchors` blocks of each of `batch_texts` texts; a
    share `filled` of them with some true tokens, which more `iterations` than one need. Raises ConfigError if a value
    is out of range.
    """

    num_layers: int = 2
    num_reads: int = 3
    block_size: int = 8
    head_tokens: int = 8192
    markov_rank: int = 64
    context_tokens: int = 256
    iterations: int = 1
    proposes: str = TREE
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
            ("num_reads", 1 <= self.num_reads <= 8, "must lie between 1 and 8"),
            ("block_size", SMALLEST <= self.block_size <= LARGEST, f"must lie between {SMALLEST} and {LARGEST}"),
            ("head_tokens", self.head_tokens >= 0, "must be 0 (all) or a number of tokens"),
            ("markov_rank", self.markov_rank >= 1, "must be 1 or more"),
            ("context_tokens", self.context_tokens >= 1, "must be 1 or more"),
            ("iterations", 1 <= self.iterations <= self.block_size, "must lie between 1 and block_size"),
            ("proposes", self.proposes in (TREE, CHAIN), f"must be {TREE} or {CHAIN}"),
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
        """The layers that the draft reads, counted from 1, of a target with so many."""
        count = min(self.num_reads, num_layers)
        return tuple(sorted({max(1, round((place + 1) * num_layers / (count + 1))) for place in range(count)}))


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Planned work: pieces of the target's answers, pieces of the given completions, and training steps."""

    chunks: int
    completions: int
    steps: int

    @classmethod
    def of(cls, minutes: float, chunk_seconds: float, step_seconds: float) -> Self:
        """About `minutes` of work, given the seconds that a piece of answers and a training step take."""
        seconds = 60.0 * minutes
        chunks = max(1, int(COLLECTING_SHARE * seconds / chunk_seconds))
        left = max(seconds - chunks * chunk_seconds, (1 - COLLECTING_SHARE) * seconds)
        return cls(chunks, chunks, max(1, int(left / step_seconds)))


@dataclass(frozen=True, slots=True)
class BegunBlock:
    """A training as stored in its folder: the target, the recipe, the texts and the plan."""

    target: str
    texts: str
    recipe: BlockRecipe
    plan: BlockPlan

    def write(self, folder: Path) -> None:
        """Write the training to its folder atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{PLAN_FILE}.partial"
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / PLAN_FILE)

    @classmethod
    def read(cls, folder: Path) -> BegunBlock | None:
        """Read the training in a folder, None if there is none. Raises ConfigError if it cannot be read."""
        if not (folder / PLAN_FILE).is_file():
            return None
        try:
            found: dict[str, Any] = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
            return cls(found["target"], found["texts"], BlockRecipe(**found["recipe"]), BlockPlan(**found["plan"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{folder / PLAN_FILE} is no plan for a block draft ({error!r}); resume it with the kind it was begun "
                "with, or start again in another folder"
            ) from error

    def check_same(self, target: str, texts: str, recipe: BlockRecipe) -> None:
        """Raise ConfigError, naming the first difference, unless this is the training that is asked for."""
        own, theirs = dataclasses.asdict(self.recipe), dataclasses.asdict(recipe)
        pairs = [("target", self.target, target), ("texts", self.texts, texts)]
        for name, begun, given in [*pairs, *((key, own[key], theirs[key]) for key in own)]:
            if begun != given:
                raise ConfigError(
                    f"the training in this folder has another {name} ({begun} there, {given} now); "
                    "resume it with the same settings, or start another one in a new folder"
                )
