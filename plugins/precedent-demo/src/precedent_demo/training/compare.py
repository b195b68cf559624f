"""Trains small drafts of several kinds for the order desk, each for the same processor time, and compares them.

python -m precedent_demo.training.compare --out DIR --minutes 10 exit-4 chain griffin

The texts are conversations of the environment's expert, on which the target was trained: the same for all. Each draft
takes as many steps as fit into the time; reading the texts, once for all that read the same, comes on top. Then all
are measured on the target's answers to turns of customers that occur in no training. A draft whose folder is there is
measured without being trained again, so a killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

from precedent.errors import PrecedentError
from precedent_demo.training.draft import TEMPERATURE, of_the_expert, reporter, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from precedent_drafts.training.lessons import Text
    from precedent_drafts.training.training import Recipe

COMMON = {"head_tokens": 2048, "temperature": TEMPERATURE, "chunk_prompts": 8}
READING = COMMON | {"context_tokens": 64, "batch_texts": 2}
ONE_LAYER = READING | {"layers": 1}

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "exit-2": ("exit", COMMON | {"exit_layer": 2}),
    "exit-4": ("exit", COMMON | {"exit_layer": 4}),
    "exit-8": ("exit", COMMON | {"exit_layer": 8}),
    "exit-4-no-layerwise": ("exit", COMMON | {"exit_layer": 4, "layerwise": 0.0}),
    "chain": ("chain", ONE_LAYER | {"rounds": 1}),
    "eagle": ("conditioned", ONE_LAYER | {"passes": 1}),
    "passes": ("conditioned", ONE_LAYER | {"passes": 3}),
    "mask": ("conditioned", ONE_LAYER | {"passes": 3, "mask_top_k": 3}),
    "fusion": ("conditioned", ONE_LAYER | {"passes": 3, "fusion": "token-guided"}),
    "griffin": ("conditioned", ONE_LAYER | {"passes": 3, "mask_top_k": 3, "fusion": "token-guided"}),
    "block": ("block", READING),
    "block-none": ("block", READING | {"condition": "none"}),
    "block-filled": ("block", READING | {"iterations": 2}),
}
"""What can be compared: the kind of training, and its recipe."""

ITERATIONS = (1, 2, 4)
"""Forwards per block with which each block draft is measured."""

TIMED_TEXTS, TIMED_STEPS = 8, 13
"""Texts and steps of the trial that says how long a step takes; its first step, which compiles, does not count."""


class Comparison:
    """Trains and measures drafts for the adapted target."""

    def __init__(self, options: argparse.Namespace) -> None:
        from precedent.target.load.loading import load_target
        from precedent_demo.adapted import adapted_target

        self._options = options
        self._model, self._tokenizer = load_target(str(adapted_target(options.adapter)))
        self._texts = of_the_expert(self._tokenizer, options.experts)

    def train(self, arm: str) -> None:
        """Train one draft, unless its folder is there."""
        folder = self._options.out / arm
        if (folder / "steps.json").is_file():
            return
        shutil.rmtree(folder, ignore_errors=True)
        steps = max(1, int(60 * self._options.minutes / self._step_seconds(arm)))
        say(f"{arm}: {steps} steps")
        started = process_time()
        self._run(arm, folder, self._texts, steps)
        seconds = {"steps": steps, "processor_seconds": process_time() - started}
        (folder / "steps.json").write_text(json.dumps(seconds), encoding="utf-8")

    def _step_seconds(self, arm: str) -> float:
        """Processor seconds of a step where nothing else slows the processor down: the least of three epochs."""
        trial, ends = self._options.out / f"{arm}.trial", list[float]()
        shutil.rmtree(trial, ignore_errors=True)

        def note(phase: str, *_: object) -> None:
            if phase == "training":
                ends.append(process_time())

        self._run(arm, trial, self._texts[:TIMED_TEXTS], TIMED_STEPS, note)
        shutil.rmtree(trial)
        epoch = (TIMED_STEPS - 1) // 3
        return min(later - before for before, later in zip(ends, ends[epoch:], strict=False)) / epoch

    def _run(self, arm: str, folder: Path, texts: Sequence[Text], steps: int, progress: Any = None) -> None:
        from precedent_drafts.training.training import Plan, Training

        kind, settings = ARMS[arm]
        recipe = made(kind, settings)
        Training(
            self._model, self._tokenizer, (), recipe, folder, completions=texts,
            progress=progress or reporter(every=50), lessons=self._options.out / "lessons",
        ).run(Plan(0, -(-len(texts) // recipe.chunk_prompts), steps))  # fmt: skip

    def report(self, arms: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Measure trained drafts, and the bare layers of exits, on the same turns."""
        texts, found = held_out(self._model, self._tokenizer, self._options.requests), dict[str, dict[str, Any]]()
        for name, place, iterations in self._measured(arms):
            say(f"measuring {name}")
            draft = loaded(place, self._model, self._tokenizer, iterations)
            found[name] = measured(self._model, name, draft, texts, self._options.temperature)
            steps = self._options.out / name.partition(" ")[0] / "steps.json"
            found[name] |= json.loads(steps.read_text(encoding="utf-8")) if steps.is_file() else {"steps": 0}
        return found

    def _measured(self, arms: Sequence[str]) -> Iterator[tuple[str, str | Path, int | None]]:
        """Names, places and forwards per block of the drafts: bare layers, chains and exits, then blocks."""
        bare = dict.fromkeys(f"first-layers:{ARMS[arm][1]['exit_layer']}" for arm in arms if ARMS[arm][0] == "exit")
        yield from ((name, name, None) for name in bare)
        yield from ((arm, self._options.out / arm, None) for arm in arms if ARMS[arm][0] != "block")
        for arm in (arm for arm in arms if ARMS[arm][0] == "block"):
            yield from ((f"{arm} T={times}", self._options.out / arm, times) for times in ITERATIONS)


def loaded(place: str | Path, model: PreTrainedModel, tokenizer: Any, iterations: int | None) -> PreTrainedModel:
    """A draft model of any kind; a block draft's blocks are filled in so many forwards, if that is said."""
    from precedent.drafters import load_draft
    from precedent_drafts.block_draft import load_block_draft

    if iterations:
        return load_block_draft(Path(place), model, iterations=iterations)
    return load_draft(place, model, tokenizer)


def measured(
    model: PreTrainedModel, name: str, draft: Any, texts: Sequence[Text], temperature: float
) -> dict[str, Any]:
    """What a draft's samples bring and cost on the target's answers, as `precedent measure-draft` says it."""
    from precedent_drafts.training.measure import Measurement

    report = asdict(Measurement(model, texts, temperature).report(name, draft))
    return report | in_words(report)


def held_out(model: PreTrainedModel, tokenizer: Any, requests: int) -> list[Text]:
    """The target's answers to turns of so many customers who occur in no training."""
    from precedent.text.prompt import render_prompt
    from precedent_demo.training.logs import logged
    from precedent_drafts.training.lessons import Author

    prompts = []
    for record in islice(logged("A", seed=0), requests):
        messages, places = record["messages"], range(len(record["messages"]))
        for place in (place for place in places if messages[place]["role"] == "assistant"):
            prompts.append(tuple(render_prompt(tokenizer, messages[:place], list(record["tools"]))))
    with closing(Author(model, tokenizer, TEMPERATURE)) as author:
        return author.texts(prompts, range(len(prompts)), 96)


def made(kind: str, settings: dict[str, Any]) -> Recipe:
    """The recipe of a kind."""
    from precedent_drafts.training.blocks import BlockRecipe
    from precedent_drafts.training.chain import ChainRecipe
    from precedent_drafts.training.conditioned import ConditionedRecipe
    from precedent_drafts.training.exits import ExitRecipe

    kinds = {"chain": ChainRecipe, "conditioned": ConditionedRecipe, "exit": ExitRecipe, "block": BlockRecipe}
    recipe: Recipe = kinds[kind](**settings)
    return recipe


def in_words(report: dict[str, Any]) -> dict[str, str]:
    """Acceptance of the first and the last draw or position, and what a draw or forward costs, as tables show them."""
    accepted = report.get("acceptance_by_draw") or report["acceptance"]
    ends = accepted[:1] if len(accepted) == 1 else (accepted[0], accepted[-1])
    return {"accepted": " to ".join(f"{share:.3f}" for share in ends), "of_a_step": f"1/{1 / report['cost']:.1f}"}


def line_of(name: str, report: dict[str, Any]) -> str:
    """One draft's figures."""
    accepted = report.get("acceptance_by_draw") or report["acceptance"]
    shares = " ".join(f"{share:.3f}" for share in accepted)
    return (
        f"{name:20} {report.get('steps', 0):6} steps, accepted {shares}; cost 1/{1 / report['cost']:.1f}, "
        f"{report['tokens_per_step']:.2f} tokens per step, {report['speed']:.2f}x"
    )


def options_of() -> argparse.Namespace:
    """The options of a run, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.training.compare", description=__doc__)
    parser.add_argument("arms", nargs="+", choices=sorted(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--adapter", type=Path, help="folder of an adapter to use instead of the package's own")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drafts, each in one of its name")
    parser.add_argument("--minutes", type=float, default=10.0, help="processor minutes of training for each")
    parser.add_argument("--experts", type=int, default=96, help="conversations of the expert to learn from")
    parser.add_argument("--requests", type=int, default=4, help="requests of customers whose turns are held out")
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of the measurement")
    parser.add_argument("--json", type=Path, help="write the results as JSON")
    return parser.parse_args()


def main() -> None:
    """Train and compare, as the command line says."""
    options = options_of()
    try:
        comparison = Comparison(options)
        for arm in options.arms:
            comparison.train(arm)
        found = comparison.report(options.arms)
    except PrecedentError as error:
        sys.exit(f"error: {error}")
    for name, report in found.items():
        print(line_of(name, report))
    if options.json:
        named = {name.replace(":", " "): report for name, report in found.items()}  # a format reads ":" as its own
        options.json.write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
