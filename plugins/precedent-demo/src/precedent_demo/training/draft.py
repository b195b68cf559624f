"""Trains the order desk's draft model: two layers beside the adapted target, distilled from its own laws.

python -m precedent_demo.training.draft --prompts questions.jsonl --out DIR

The target serves customers of the split "train"; to these conversations come others of the environment's expert, whose
words the target was taught, and the target's answers to the prompts of a file. `precedent train-draft`'s distillation
learns what the target thinks of them. A run that was killed goes on with --resume.
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
    from precedent.training.distil import Trained
    from precedent.training.texts import Text
    from precedent_demo.training.trajectories import Encoder

TEMPERATURE = 0.7
"""At which the target serves customers: the demo is run greedily and at this temperature."""

HEAD_TOKENS, ANSWER_TOKENS, LONGEST_CONTEXT, LONGEST_PROMPT = 2048, 96, 256, 160
BATCH_TOKENS = 256
REQUESTS_PER_DATABASE = 40
EXPERT_SEED = 900
"""The adapter's training counts its databases up from another one."""


def conversations(engine: Engine, turns: list[tuple[tuple[int, ...], GenerationResult]], number: int) -> list[Text]:
    """Whole conversations of the target with customers of the training split, all behind the head as context.

    `turns` is where the engine's `on_result` puts each finished turn.
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
            _say(f"served {len(texts)} of {number}")
        desk.close()
    return texts


def of_the_expert(tokenizer: PreTrainedTokenizerBase, number: int) -> list[Text]:
    """Conversations of the expert with customers that neither the adapter nor the served conversations have seen."""
    from precedent_demo.training.trajectories import Encoder
    from precedent_demo.training.trajectories import conversations as generated

    encoder = Encoder(tokenizer)
    return [_text(encoder, each.token_ids) for each in islice(generated(encoder, "train", EXPERT_SEED), number)]


def _text(encoder: Encoder, token_ids: Sequence[int]) -> Text:
    """What follows the head; of it only the assistant's words are learned."""
    from precedent.training.texts import Text

    return Text((*encoder.head, *token_ids), len(token_ids), encoder.written(token_ids))


def train(options: argparse.Namespace) -> Trained:
    """Serve, answer, distil; the draft stands in the folder afterwards."""
    from precedent.target.load.loading import load_target
    from precedent.training.distil import Distillation
    from precedent.training.plan import Plan, Recipe
    from precedent.training.prompts import read_prompts, split
    from precedent_demo.adapted import adapted_target

    model, tokenizer = load_target(str(adapted_target(options.adapter)))
    learned, _ = split(read_prompts(options.prompts, tokenizer, LONGEST_PROMPT)[0], seed=0)
    texts = [*_served(options, model, tokenizer), *of_the_expert(tokenizer, options.experts)]
    recipe = Recipe(
        head_tokens=HEAD_TOKENS, answer_tokens=ANSWER_TOKENS, longest_context=LONGEST_CONTEXT, rounds=options.rounds,
        batch_tokens=BATCH_TOKENS, start=options.start,
    )  # fmt: skip
    plan = Plan(
        chunks=-(-options.answers // recipe.chunk_prompts),
        completions=-(-len(texts) // recipe.chunk_prompts),
        rollouts=-(-options.rollouts // recipe.chunk_prompts),
        rounds=options.rounds,
        steps_per_round=-(-options.steps // options.rounds),
    )
    distillation = Distillation(
        model, tokenizer, learned, recipe, options.out, completions=texts, progress=_reporter(every=20)
    )
    return distillation.run(plan)


def _served(options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Text]:
    """Conversations with customers, kept beside the draft's folder until somebody deletes them."""
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
    from precedent.training.texts import Text

    found: list[tuple[list[int], int, list[bool]]] = json.loads(path.read_text(encoding="utf-8"))
    return [Text(tuple(token_ids), count, tuple(learned)) for token_ids, count, learned in found]


def _reporter(every: int) -> Callable[[str, int, int, float | None], None]:
    def report(phase: str, done: int, total: int, loss: float | None) -> None:
        if loss is None or done % every == 0 or done == total:
            _say(f"{phase} {done} of {total}" + ("" if loss is None else f", loss {loss:.3f}"))

    return report


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def options_of() -> argparse.Namespace:
    """The settings of a run."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.training.draft", description=__doc__)
    parser.add_argument("--adapter", type=Path, help="folder of another adapter than the package's own")
    parser.add_argument("--prompts", type=Path, required=True, help="general questions, as train-draft takes them")
    parser.add_argument("--out", type=Path, required=True, help="folder of the draft model")
    parser.add_argument("--start", default="ends", help="what it begins as: ends, first, last or a draft's folder")
    parser.add_argument("--requests", type=int, default=160, help="customers to serve first")
    parser.add_argument("--experts", type=int, default=800, help="conversations of the expert to read")
    parser.add_argument("--answers", type=int, default=160, help="of the target to the prompts")
    parser.add_argument("--rollouts", type=int, default=160, help="of the draft in each round but the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4500, help="of all rounds")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train, as the command line says."""
    try:
        trained = train(options_of())
    except PrecedentError as error:
        sys.exit(f"error: {error}")
    _say(f"{trained.plan}, {trained.num_tokens:,} tokens of the target's own")


if __name__ == "__main__":
    main()
