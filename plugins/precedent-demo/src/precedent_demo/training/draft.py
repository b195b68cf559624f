"""Trains the order desk's draft model: two layers beside the adapted target, distilled from its own conversations.

python -m precedent_demo.training.draft --prompts questions.jsonl --out DIR --minutes 30

First the target serves customers of the split "train"; then `precedent train-draft`'s distillation learns from these
conversations and from the target's answers to the prompts of a file. A run that was killed goes on with --resume.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from precedent.errors import PrecedentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent.engine import Engine
    from precedent.generation import GenerationResult
    from precedent.training.distil import Trained
    from precedent.training.texts import Text

TEMPERATURE = 0.7
"""At which the target serves customers: the demo is run greedily and at this temperature."""

HEAD_TOKENS, ANSWER_TOKENS, LONGEST_CONTEXT, LONGEST_PROMPT = 8192, 96, 256, 160
REQUESTS_PER_DATABASE = 40


def conversations(engine: Engine, turns: list[tuple[tuple[int, ...], GenerationResult]], number: int) -> list[Text]:
    """Whole conversations of the target with customers of the training split, all behind the head as context.

    `turns` is where the engine's `on_result` puts each finished turn. Not only the assistant's words are learned, but
    all that follows the tool schemas: the target has a law there too, and a text is read only once.
    """
    from precedent.langchain import ChatPrecedent
    from precedent.training.texts import Text
    from precedent_demo.conversation import MAX_TOKENS_PER_TURN, run_request
    from precedent_demo.desk import OrderDesk
    from precedent_demo.training.trajectories import Encoder
    from precedent_demo.workflows import generate_requests

    head, texts = len(Encoder(engine.tokenizer).head), []
    model = ChatPrecedent.from_engine(engine, temperature=TEMPERATURE, max_tokens=MAX_TOKENS_PER_TURN)
    for first in range(0, number, REQUESTS_PER_DATABASE):
        seed = 1_000_000 + first
        desk = OrderDesk.from_seed(seed, "train")
        for request in islice(generate_requests("train", seed, desk), min(REQUESTS_PER_DATABASE, number - first)):
            turns.clear()
            run_request(model, request, desk)
            prompt, result = turns[-1]
            whole = (*prompt, *result.token_ids)
            texts.append(Text(whole, len(whole) - head))
            _say(f"served {len(texts)} of {number}")
        desk.close()
    return texts


def train(options: argparse.Namespace) -> Trained:
    """Serve, answer, distil; the draft stands in the folder afterwards."""
    from precedent.target.loading import load_target
    from precedent.training.distil import Distillation
    from precedent.training.plan import Recipe
    from precedent.training.prompts import read_prompts, split
    from precedent_demo.adapted import adapted_target

    model, tokenizer = load_target(str(adapted_target(options.adapter)))
    learned, _ = split(read_prompts(options.prompts, tokenizer, LONGEST_PROMPT)[0], seed=0)
    texts = _served(options, model, tokenizer)
    recipe = Recipe(
        head_tokens=HEAD_TOKENS, answer_tokens=ANSWER_TOKENS, longest_context=LONGEST_CONTEXT, rounds=options.rounds
    )
    distillation = Distillation(
        model, tokenizer, learned, recipe, options.out, completions=texts, progress=_reporter(every=20)
    )
    return distillation.run(options.minutes)


def _served(options: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Text]:
    """Conversations with customers, kept beside the draft's folder until somebody deletes them."""
    from precedent.cache import SpeculationCache
    from precedent.engine import Engine

    kept = options.out.with_name(f"{options.out.name}.conversations.json")
    if options.resume and kept.is_file():
        return _read(kept)
    turns: list[tuple[tuple[int, ...], GenerationResult]] = []
    serving = Engine(
        model,
        tokenizer,
        name="order-desk",
        cache=SpeculationCache.open(None),
        on_result=lambda prompt_ids, result: turns.append((prompt_ids, result)),
    )
    with closing(serving):
        texts = conversations(serving, turns, options.requests)
    kept.write_text(json.dumps([[text.token_ids, text.num_answer_tokens] for text in texts]), encoding="utf-8")
    return texts


def _read(path: Path) -> list[Text]:
    from precedent.training.texts import Text

    found: list[tuple[list[int], int]] = json.loads(path.read_text(encoding="utf-8"))
    return [Text(tuple(token_ids), count) for token_ids, count in found]


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
    parser.add_argument("--requests", type=int, default=160, help="customers to serve first")
    parser.add_argument("--minutes", type=float, default=30, help="of distillation, without serving")
    parser.add_argument("--rounds", type=int, default=2)
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
