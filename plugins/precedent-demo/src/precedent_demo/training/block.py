"""Trains the order desk's block draft: two layers that fill eight positions from what the adapted target saw.

python -m precedent_demo.training.block --out DIR

The texts are conversations of the environment's expert, on which the target was trained, and of the target itself with
customers of the split "train". The training is that of `precedent train-draft --kind block`. --resume continues a
killed run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from precedent.errors import PrecedentError
from precedent_demo.training.draft import TEMPERATURE, of_the_expert, reporter, say, served

if TYPE_CHECKING:
    from precedent_drafts.training.training import TrainedDraft

HEAD_TOKENS, CONTEXT_TOKENS, CHUNK, CHECKPOINT_STEPS = 2048, 192, 8, 10


def train(options: argparse.Namespace) -> TrainedDraft:
    """Serve customers, read all texts, and train the block draft into the output folder."""
    from precedent.target.load.loading import load_target
    from precedent_demo.adapted import adapted_target
    from precedent_drafts.training.blocks import BlockRecipe
    from precedent_drafts.training.training import Plan, Training

    model, tokenizer = load_target(str(adapted_target(options.adapter)))
    texts = of_the_expert(tokenizer, options.experts)
    if options.requests:
        texts += served(options, model, tokenizer)
    recipe = BlockRecipe(
        layers=options.layers, head_tokens=HEAD_TOKENS, context_tokens=CONTEXT_TOKENS, temperature=TEMPERATURE,
        chunk_prompts=CHUNK, batch_texts=options.batch_texts, anchors=options.anchors,
        learning_rate=options.learning_rate, start=options.start,
    )  # fmt: skip
    plan = Plan(0, -(-len(texts) // recipe.chunk_prompts), options.steps)
    training = Training(
        model, tokenizer, (), recipe, options.out, completions=texts, progress=reporter(every=10),
        checkpoint_steps=CHECKPOINT_STEPS,
    )  # fmt: skip
    return training.run(plan)


def options_of() -> argparse.Namespace:
    """The options of a run, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.training.block", description=__doc__)
    parser.add_argument("--adapter", type=Path, help="folder of an adapter to use instead of the package's own")
    parser.add_argument("--out", type=Path, required=True, help="folder for the block draft")
    parser.add_argument("--start", default="ends", help="folder of a block draft to train on, or the target's ends")
    parser.add_argument("--layers", type=int, default=2, help="layers of the draft")
    parser.add_argument("--requests", type=int, default=0, help="customers to serve first")
    parser.add_argument("--experts", type=int, default=256, help="conversations of the expert to learn from")
    parser.add_argument("--batch-texts", type=int, default=4, help="texts of a training step")
    parser.add_argument("--anchors", type=int, default=24, help="blocks learned in each of them")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=1000, help="training steps")
    parser.add_argument("--resume", action="store_true", help="go on with the training in --out")
    return parser.parse_args()


def main() -> None:
    """Train, as the command line says."""
    try:
        trained = train(options_of())
    except PrecedentError as error:
        sys.exit(f"error: {error}")
    say(f"{trained.plan}, {trained.num_tokens:,} tokens from the target")


if __name__ == "__main__":
    main()
