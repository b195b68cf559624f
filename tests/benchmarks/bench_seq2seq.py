"""Draft-then-verify on a translation pair, as in SpecDec (2203.16487): tokens per step and quality, exact and relaxed.

    python tests/benchmarks/bench_seq2seq.py [--steps 2000] [--notes 100] [--draws 6] [--folder DIR] [--json FILE]

Target and draft model are trained from scratch on notes and translations made by rule (`seq2seq_bench.language`), in
minutes on a CPU; `--folder` keeps them. Then the same held-out notes are translated greedily: plain, with exact
verification, and with `lossy_top_beta` at several β and τ. In each step the draft model draws a chain of `--draws`
tokens, so that tokens per step do not depend on this machine's clock.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from measurement import Measurement, json_option
from seq2seq_bench.language import canonical, pair
from seq2seq_bench.training import DRAFT, HELD_OUT, TARGET, trained, word_tokenizer
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.planning.plan import DrawSource, Limits, Plan
from precedent.planning.planner import Planner

RELAXED = ((1, 0.0), (2, 0.5), (2, 1.0), (2, 2.0), (3, 1.0), (3, 3.0), (5, 5.0), (10, 10.0))
"""β and τ."""


class SteadyPlanner(Planner):
    """A chain of so many draws in every step, whatever it costs."""

    draws = 6

    def plan(self, candidates: Sequence[Any], draw_sources: Mapping[str, DrawSource], limits: Limits) -> Plan:
        """As many draws as the limits allow."""
        plan = super().plan(candidates, {}, limits)
        plan.draws.update(dict.fromkeys(draw_sources, min(self.draws, limits.max_draws, limits.max_depth)))
        return plan


class Quality(NamedTuple):
    """What one way of decoding made of all notes."""

    tokens_per_step: float
    right: float
    words_right: float
    same: float


def main() -> None:
    """Train or load the pair, print one line for each way of decoding, and write them as JSON."""
    options, measurement, found = _options(), Measurement(), list[dict[str, Any]]()
    tokenizer = word_tokenizer()
    target, draft = (_model(tokenizer, options, name) for name in ("target", "draft"))
    with closing(Engine.load(target, tokenizer=tokenizer, draft_model=draft)) as engine:
        engine.planner.__class__, SteadyPlanner.draws = SteadyPlanner, options.draws
        plain = _answers(engine, options.notes, None)
        print(f"{'way':34} {'tokens per step':>15} {'notes right':>12} {'words right':>12} {'as plain':>9}")
        for mode in (None, "greedy", *(f"lossy_top_beta:beta={beta},tau={tau}" for beta, tau in RELAXED)):
            results = plain if mode is None else _answers(engine, options.notes, mode)
            quality = _quality(engine, results, plain)
            _print(mode or "plain", quality)
            found.append({"way": mode or "plain", **quality._asdict()})
    measurement.write(options.json, {"notes": options.notes, "draws": options.draws, "ways": found})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="training steps of the target; the draft takes half")
    parser.add_argument("--notes", type=int, default=100)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=None)
    json_option(parser)
    return parser.parse_args()


def _model(tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace, name: str) -> PreTrainedModel:
    folder = None if options.folder is None else options.folder / name
    if folder is not None and folder.exists():
        return AutoModelForSeq2SeqLM.from_pretrained(folder)
    shape, steps, seed = (TARGET, options.steps, 0) if name == "target" else (DRAFT, options.steps // 2, 1)
    model = trained(
        tokenizer, shape, steps=steps, seed=seed, report=lambda text: print(f"{name}: {text}", file=sys.stderr)
    )
    if folder is not None:
        model.save_pretrained(folder)
    return model


def _answers(engine: Engine, notes: int, mode: str | None) -> list[Any]:
    """The results for all notes; plain decoding without a mode."""
    asked = (
        SpeculationConfig(enabled=False) if mode is None else SpeculationConfig(drafters=("draft-model",), mode=mode)
    )
    sampling = SamplingParams(max_tokens=160)
    prompts = [engine.tokenizer.encode(pair(HELD_OUT + number).source) for number in range(notes)]
    return [engine.submit(prompt, sampling, speculation=asked).result() for prompt in prompts]


def _quality(engine: Engine, results: Sequence[Any], plain: Sequence[Any]) -> Quality:
    tokens, steps = (sum(getattr(one.stats, name) for one in results) for name in ("num_output_tokens", "num_steps"))
    found = [canonical(_text(engine, one)).split() for one in results]
    wanted = [canonical(pair(HELD_OUT + number).target).split() for number in range(len(results))]
    compared = list(zip(found, wanted, strict=True))
    hits = sum(sum(map(str.__eq__, one, other)) for one, other in compared)
    return Quality(
        tokens / steps,
        sum(one == other for one, other in compared) / len(results),
        hits / sum(max(len(one), len(other)) for one, other in compared),
        sum(one.token_ids == other.token_ids for one, other in zip(results, plain, strict=True)) / len(results),
    )


def _text(engine: Engine, result: Any) -> str:
    words = engine.tokenizer.convert_ids_to_tokens(list(result.token_ids))
    return " ".join(word for word in words if word != engine.tokenizer.eos_token)


def _print(name: str, quality: Quality) -> None:
    shares = " ".join(f"{share:>{width}.1%}" for share, width in zip(quality[1:], (12, 12, 9), strict=True))
    print(f"{name:34} {quality.tokens_per_step:15.2f} {shares}", flush=True)


if __name__ == "__main__":
    main()
