"""Trains the order desk's adapter: LoRA on SmolLM2-135M-Instruct, with conversations of the environment's expert.

python -m precedent_demo.training.adapter --minutes 60 --out DIR --resume
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from precedent.errors import PrecedentError
from precedent.target.load.loading import DEMO_TARGET, load_target
from precedent_demo.training import checkpoints
from precedent_demo.training.batches import POOL, Batch, batches
from precedent_demo.training.checkpoints import Progress
from precedent_demo.training.loss import Head, loss_of
from precedent_demo.training.trajectories import Encoder

RANK = 16  # 9.8 MB in bfloat16
WARM_UP_STEPS, DECAY_FROM, FINAL_RATE = 10, 0.6, 0.05
HEAD_LIFETIME = 6
HELD_OUT_BATCHES = 6

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


class Trainer:
    """One training run: `model` with its adapter, the `parameters` to train, and the folder for checkpoint and adapter.

    Time is CPU time per thread, which equals wall-clock time on an idle machine. Other work on the machine, or an
    interruption, therefore does not change what a run learns. Batches come from pools of `pool_size` conversations;
    the head's keys and values are computed again every `head_lifetime` steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: argparse.Namespace,
        *,
        pool_size: int = POOL,
        head_lifetime: int = HEAD_LIFETIME,
    ) -> None:
        self._pool_size = pool_size
        self._options, self._out = options, Path(options.out)
        self._out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        self._encoder = Encoder(tokenizer)
        self.model = _with_adapter(model)
        self.parameters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self._optimizer = AdamW(self.parameters.values(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0)
        self._short_head = Head(self._encoder.short_head, head_lifetime)
        self._head = Head(self._encoder.head, head_lifetime)
        self._progress = Progress()
        if options.resume:
            self._progress = checkpoints.load(self._out, self.parameters, self._optimizer)

    def run(self) -> None:
        """Train until the time is used up, saving checkpoints and reporting the held-out loss on the way."""
        options, progress = self._options, self._progress
        last_saved = last_held_out = time.monotonic()
        for batch in self._batches("train", progress.pool, progress.number):
            if progress.seconds >= options.minutes * 60:
                break
            self._report(*self._step(batch))
            if time.monotonic() - last_saved > options.save_seconds:
                self.save()
                last_saved = time.monotonic()
            if time.monotonic() - last_held_out > options.held_out_seconds:
                self.report_held_out()
                last_held_out = time.monotonic()
        self.save()
        self.report_held_out()

    def _step(self, batch: Batch) -> tuple[float, float, float]:
        started = time.process_time()
        rate = self._rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        head = self._short_head if self._done() < self._options.full_head_from else self._head
        loss, hits = loss_of(self.model, head, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._progress.steps += 1
        self._progress.pool, self._progress.number = batch.pool, batch.number + 1
        self._progress.tokens += batch.num_tokens
        self._progress.seconds += (time.process_time() - started) / torch.get_num_threads()
        return loss.item(), hits, rate

    def _done(self) -> float:
        return self._progress.seconds / (self._options.minutes * 60)

    def _rate(self) -> float:
        """The learning rate: warm-up, then constant, then a linear decay to the fraction `FINAL_RATE`."""
        done = self._done()
        decay = (
            1.0 if done < DECAY_FROM else 1.0 - (1.0 - FINAL_RATE) * min(1.0, (done - DECAY_FROM) / (1 - DECAY_FROM))
        )
        return float(self._options.rate * min(1.0, (self._progress.steps + 1) / WARM_UP_STEPS) * decay)

    def _report(self, loss: float, hits: float, rate: float) -> None:
        progress = self._progress
        speed = progress.tokens / progress.seconds
        _say(
            f"step {progress.steps}  {progress.seconds / 60:.1f} of {self._options.minutes:g} min  "
            f"{progress.tokens:,} tokens  {speed:.0f} tokens/s  loss {loss:.4f}  hits {hits:.1%}  rate {rate:.1e}"
        )

    def report_held_out(self) -> None:
        """Report loss and hits on conversations of set A; its names, ids and sentences do not occur in training."""
        head = Head(self._encoder.head, lifetime=HELD_OUT_BATCHES)
        with torch.no_grad():
            measured = [loss_of(self.model, head, batch) for batch in self._held_out()]
        loss = sum(loss.item() for loss, _ in measured) / len(measured)
        hits = sum(hits for _, hits in measured) / len(measured)
        _say(f"step {self._progress.steps}  held-out loss {loss:.4f}  hits {hits:.2%}")

    def _held_out(self) -> Iterator[Batch]:
        return islice(self._batches("A"), HELD_OUT_BATCHES)

    def _batches(self, set_name: str, pool: int = 0, number: int = 0) -> Iterator[Batch]:
        tokens = self._options.batch_tokens
        return batches(self._encoder, set_name, tokens, pool, number, pool_size=self._pool_size)

    def save(self) -> None:
        """Save a checkpoint to resume from, and the adapter as peft and `precedent_demo.adapted_target` read it."""
        checkpoints.save(self._out, self.parameters, self._optimizer, self._progress)
        weights = {name: one.to(torch.bfloat16) for name, one in get_peft_model_state_dict(self.model).items()}
        partial = self._out / f"{ADAPTER_FILE}.partial"
        save_file(weights, partial)
        partial.replace(self._out / ADAPTER_FILE)
        config: Any = self.model.peft_config["default"]
        config.base_model_name_or_path = DEMO_TARGET
        config.save_pretrained(self._out)


def _with_adapter(model: PreTrainedModel) -> Any:
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, settings, autocast_adapter_dtype=False)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a run, from the command line or from `arguments`."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.training.adapter", description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="CPU time per thread, including earlier runs")
    parser.add_argument("--out", required=True, help="folder for the checkpoint and the adapter")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out, if there is one")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--batch-tokens", type=int, default=1200, help="positions in one step")
    parser.add_argument("--dtype", default="float32", help="use bfloat16 only on processors that compute in it")
    parser.add_argument(
        "--full-head-from",
        type=float,
        default=0.6,
        help="fraction of the time after which the prompt includes the tool schemas, as at inference; without them "
        "a step costs half",
    )
    parser.add_argument("--save-seconds", type=float, default=150)
    parser.add_argument("--held-out-seconds", type=float, default=900)
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: give more than 0")
    return options


def main() -> None:
    """Train with the options of the command line."""
    options = options_of()
    try:
        model, tokenizer = load_target(DEMO_TARGET, dtype=options.dtype, device="cpu")
        Trainer(model, tokenizer, options).run()
    except PrecedentError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
