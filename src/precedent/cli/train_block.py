"""`precedent train-draft --kind block`: the recipe from its options, the training, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from precedent.cli.options import write_json
from precedent.cli.progress import Progress
from precedent.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent.target.block.draft import BlockDraft
    from precedent.training.block_recipe import BlockRecipe
    from precedent.training.prompts import Prompt
    from precedent.training.texts import Text

REPORT_FILE = "report.json"

HELD_OUT_SEED = 1 << 40
"""Added to the seeds for answers to held-out prompts."""


class Kind(StrEnum):
    """What is trained."""

    CHAIN = "chain"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Block:
    """The options of the command that a block draft takes."""

    layers: int
    start: str
    head_tokens: int
    temperature: float
    answer_tokens: int
    seed: int
    block_size: int
    context_tokens: int
    iterations: int
    condition: str

    def recipe(self) -> BlockRecipe:
        """The recipe. Raises ConfigError or UnsupportedError for what a block draft does not take."""
        from precedent.training.block_recipe import BlockRecipe

        if self.condition != "target":
            raise UnsupportedError(
                f"--condition {self.condition}: a block draft reads its target; one with a context of its own is not "
                "supported"
            )
        if self.start != "ends":
            raise ConfigError(f"--start {self.start} is for --kind chain: a block draft begins with the target's ends")
        return BlockRecipe(
            num_layers=self.layers, block_size=self.block_size, head_tokens=self.head_tokens,
            context_tokens=self.context_tokens, iterations=self.iterations, temperature=self.temperature,
            answer_tokens=self.answer_tokens, seed=self.seed, filled=0.0 if self.iterations == 1 else 0.5,
        )  # fmt: skip


def train_block(
    progress: Progress,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: tuple[Sequence[Prompt], Sequence[Prompt]],
    completions: Sequence[Text],
    recipe: BlockRecipe,
    out: Path,
    minutes: float,
    json: Path | None,
) -> None:
    """Train on the first prompts, report on the second ones, and write the report beside the draft."""
    from precedent.target.block.draft import load_block_draft
    from precedent.target.fingerprints import name_of
    from precedent.training.block_training import BlockTraining

    learned, held_out = prompts
    training = BlockTraining(
        model, tokenizer, learned, recipe, out, completions=completions, announce=progress.say,
        progress=partial(_show_phase, progress),
    )  # fmt: skip
    trained = training.run(minutes)
    report = measured(progress, model, tokenizer, {str(out): load_block_draft(out, model)}, held_out, recipe)
    written = {
        "target": name_of(model), "blocks": report, "recipe": asdict(recipe), "plan": asdict(trained.plan),
        "tokens": trained.num_tokens,
    }  # fmt: skip
    write_json(out / REPORT_FILE, written)
    progress.rest()
    show_blocks(report)
    if json:
        write_json(json, written)


def measured(
    progress: Progress,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: dict[str, BlockDraft],
    held_out: Sequence[Prompt],
    recipe: Any,
) -> list[dict[str, Any]]:
    """The reports on block drafts, on the target's answers to held-out prompts."""
    from precedent.training.block_measure import BlockMeasurement
    from precedent.training.teacher import Author

    first_seed = recipe.seed + HELD_OUT_SEED
    progress.show("answering held-out prompts", 0, len(held_out))
    with closing(Author(model, tokenizer, recipe.temperature)) as author:
        texts = author.texts(held_out, range(first_seed, first_seed + len(held_out)), recipe.answer_tokens)
    return [
        BlockMeasurement(model, draft, texts, recipe.temperature)
        .report(name, partial(progress.show, f"measuring {name}"))
        .as_dict()
        for name, draft in drafts.items()
    ]


def show_blocks(reports: Sequence[dict[str, Any]]) -> None:
    """A table of block drafts."""
    table = Table(title=f"block drafts, target: {reports[0]['target_milliseconds']:.1f} ms per step")
    for column in ("draft", "accepted, by position", "ms", "cost", "nodes", "per step", "speed"):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for each in reports:
        table.add_row(
            Path(each["draft"]).name, " ".join(f"{share:.2f}" for share in each["acceptance"]),
            f"{each['forward_milliseconds']:.1f}", f"1/{1 / each['cost']:.1f}", str(each["nodes"]),
            f"{each['tokens_per_step']:.2f}", f"{each['speed']:.2f}x",
        )  # fmt: skip
    Console().print(table)


def _show_phase(progress: Progress, phase: str, done: int, total: int, loss: float | None = None) -> None:
    progress.show(phase, done, total, "" if loss is None else f"loss {loss:.3f}")
