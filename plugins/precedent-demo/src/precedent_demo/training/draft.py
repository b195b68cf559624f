"""Trains the order desk's draft model: two layers, distilled from the adapted target's own distributions.

python -m precedent_demo.training.draft --prompts questions.jsonl --out DIR

The texts are conversations in which the target serves customers of the split "train", conversations of the
environment's expert, on which the target was trained, and the target's answers to the prompts of a file. The
distillation of `precedent train-draft` learns the target's distributions on them. --resume continues a killed run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from precedent.errors import PrecedentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent.engine.engine import Engine
    from precedent.engine.generation import GenerationResult
    from precedent.engine.options import EngineOptions
    from precedent_demo.training.trajectories import Encoder
    from precedent_drafts.training.lessons import Text
    from precedent_drafts.training.training import TrainedDraft

TEMPERATURE = 0.7
"""The target serves customers at this temperature; the demo runs greedily and at this temperature."""

HEAD_TOKENS, ANSWER_TOKENS, LONGEST_CONTEXT, LONGEST_PROMPT = 2048, 96, 256, 160
BATCH_TEXTS = 2
REQUESTS_PER_DATABASE = 40
EXPERT_SEED = 900
"""Differs from the adapter's training, so that the databases differ as well."""


def conversations(engine: Engine, turns: list[tuple[tuple[int, ...], GenerationResult]], number: int) -> list[Text]:
    """Whole conversations of the target with customers of the training split, with the head as their context.

    The engine's `on_result` must append each finished turn to `turns`.
    """
    from precedent.langchain import ChatPrecedent
    from precedent_demo.conversation import MAX_TOKENS_PER_TURN, run_request
    from precedent_demo.desk import OrderDesk
    from precedent_demo.training.trajectories import Encoder
    from precedent_demo.workflows import generate_requests

    encoder, texts = Encoder(engine.tokenizer), []
    model = ChatPrecedent.from_engine(engine, temperature=TEMPERATURE, max_tokens=MAX_TOKENS_PER_TURN)
    for first in range(0, number, REQUESTS_PER_DATABASE):
        seed = 1_000_000 + first
        desk = OrderDesk.from_seed(seed, "train")
        for request in islice(generate_requests("train", seed, desk), min(REQUESTS_PER_DATABASE, number - first)):
            turns.clear()
            run_request(model, request, desk)
            prompt, result = turns[-1]
            texts.append(_text(encoder, (*prompt, *result.token_ids)[len(encoder.head) :]))
            say(f"served {len(texts)} of {number}")
        desk.close()
    return texts


def of_the_expert(tokenizer: PreTrainedTokenizerBase, number: int) -> list[Text]:
    """Conversations of the expert with customers that occur in neither the adapter's training nor `conversations`."""
    from precedent_demo.training.trajectories import Encoder
    from precedent_demo.training.trajectories import conversations as generated

    encoder = Encoder(tokenizer)
    return [_text(encoder, each.token_ids) for each in islice(generated(encoder, "train", EXPERT_SEED), number)]


def _text(encoder: Encoder, token_ids: Sequence[int]) -> Text:
    """The text after the head; only the assistant's tokens in it are learned."""
    from precedent_drafts.training.lessons import Text

    return Text((*encoder.head, *token_ids), len(token_ids), encoder.written(token_ids))


def train(options: argparse.Namespace) -> TrainedDraft:
    """Serve customers, answer prompts, and distil the draft model into the output folder."""
    from precedent.target.load.loading import load_target
    from precedent_demo.adapted import adapted_target
    from precedent_drafts.training.chain import ChainRecipe
    from precedent_drafts.training.prompts import read_prompts, split
    from precedent_drafts.training.training import Plan, Training

    model, tokenizer = load_target(str(adapted_target(options.adapter)))
    learned, _ = split(read_prompts(options.prompts, tokenizer, LONGEST_PROMPT)[0], seed=0)
    texts = [*served(options, model, tokenizer), *of_the_expert(tokenizer, options.experts)]
    recipe = ChainRecipe(
        head_tokens=HEAD_TOKENS, answer_tokens=ANSWER_TOKENS, context_tokens=LONGEST_CONTEXT, rounds=options.rounds,
        batch_texts=BATCH_TEXTS, start=options.start,
    )  # fmt: skip
    plan = Plan(
        chunks=-(-options.answers // recipe.chunk_prompts),
        completions=-(-len(texts) // recipe.chunk_prompts),
        steps=options.steps,
        rounds=options.rounds,
        rollouts=-(-options.rollouts // recipe.chunk_prompts),
    )
    training = Training(model, tokenizer, learned, recipe, options.out, completions=texts, progress=reporter(every=20))
    return training.run(plan)


def served(options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Text]:
    """Conversations with customers; a file beside the draft's folder keeps them for --resume."""
    from precedent.cache import SpeculationCache
    from precedent.engine.engine import Engine

    kept = options.out.with_name(f"{options.out.name}.conversations.json")
    if options.resume and kept.is_file():
        return _read(kept)
    turns: list[tuple[tuple[int, ...], GenerationResult]] = []
    serving = Engine(
        model,
        tokenizer,
        EngineOptions(cache=SpeculationCache.open(None)),
        name="order-desk",
        on_result=lambda prompt_ids, result: turns.append((prompt_ids, result)),
    )
    with closing(serving):
        texts = conversations(serving, turns, options.requests)
    kept.write_text(json.dumps([dataclasses.astuple(text) for text in texts]), encoding="utf-8")
    return texts


def _read(path: Path) -> list[Text]:
    from precedent_drafts.training.lessons import Text

    found: list[tuple[list[int], int, list[bool]]] = json.loads(path.read_text(encoding="utf-8"))
    return [Text(tuple(token_ids), count, tuple(learned)) for token_ids, count, learned in found]


def reporter(every: int) -> Callable[[str, int, int, float | None], None]:
    """What writes a training's progress to stderr: every step of reading, and each of so many steps of training."""

    def report(phase: str, done: int, total: int, loss: float | None) -> None:
        if loss is None or done % every == 0 or done == total:
            say(f"{phase} {done} of {total}" + ("" if loss is None else f", loss {loss:.3f}"))

    return report


def say(line: str) -> None:
    """Write a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def options_of() -> argparse.Namespace:
    """The options of a run, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.training.draft", description=__doc__)
    parser.add_argument("--adapter", type=Path, help="folder of an adapter to use instead of the package's own")
    parser.add_argument("--prompts", type=Path, required=True, help="general questions, in train-draft's formats")
    parser.add_argument("--out", type=Path, required=True, help="folder for the draft model")
    parser.add_argument("--start", default="ends", help="initial weights: ends, first, last or a draft model's folder")
    parser.add_argument("--requests", type=int, default=160, help="customers to serve first")
    parser.add_argument("--experts", type=int, default=800, help="conversations of the expert to learn from")
    parser.add_argument("--answers", type=int, default=160, help="the target's answers to the prompts")
    parser.add_argument("--rollouts", type=int, default=160, help="the draft's texts in each round but the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4500, help="training steps of all rounds together")
    parser.add_argument("--resume", action="store_true")
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
