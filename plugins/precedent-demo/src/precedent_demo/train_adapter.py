"""Trains the order desk's adapter: LoRA on SmolLM2-135M-Instruct, with conversations of the environment's expert.

python -m precedent_demo.train_adapter --steps 500 --out DIR
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from precedent.errors import PrecedentError
from precedent.target.load.loading import DEMO_TARGET, load_target
from precedent.text.prompt import Message, render_prompt
from precedent_demo.conversation import SYSTEM_PROMPT
from precedent_demo.desk import OrderDesk
from precedent_demo.logs import expert_messages, tool_schemas
from precedent_demo.workflows import SPLITS, generate_requests

RANK = 16  # 9.8 MB in bfloat16
RATE = 1.5e-3
"""Highest learning rate."""

REQUESTS_PER_DATABASE = 40
CONVERSATIONS_PER_STEP = 6


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids `[length]` after the head of the prompt, and which of them the assistant wrote, `<|im_end|>` included.

    The head, the system turn with the tool schemas, is the same for all conversations.
    """

    token_ids: Tensor
    written: Tensor


class Encoder:
    """Turns messages into the ids that `render_prompt` gives at inference."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self._assistant = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
        user = tokenizer.encode("<|im_start|>user", add_special_tokens=False)
        prompt = self._prompt([{"role": "user", "content": "x"}])
        self.head = prompt[: max(place for place in range(len(prompt)) if prompt[place : place + len(user)] == user)]

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        system = {"role": "system", "content": SYSTEM_PROMPT}
        return render_prompt(self._tokenizer, [system, *messages], tool_schemas())

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """A whole conversation; it ends with the `<|im_end|>` of the last turn of the assistant."""
        prompt = self._prompt(messages)[: -len(self._assistant)]
        ends = [place for place, token in enumerate(prompt) if token == self._end]
        token_ids = prompt[len(self.head) : ends[-1] + 1]
        written, inside = [], False
        for place, token in enumerate(token_ids):
            inside = inside or token_ids[max(0, place - len(self._assistant)) : place] == self._assistant
            written.append(inside)
            inside = inside and token != self._end
        return Conversation(torch.tensor(token_ids), torch.tensor(written))


def conversations(encoder: Encoder, set_name: str) -> Iterator[Conversation]:
    """Endless conversations, on a new database after every `REQUESTS_PER_DATABASE` requests."""
    for number in count():
        desk, rng = OrderDesk.from_seed(number, SPLITS[set_name]), random.Random(f"expert {set_name} {number}")
        for request in islice(generate_requests(set_name, number, desk), REQUESTS_PER_DATABASE):
            yield encoder.conversation(expert_messages(request, desk, rng))
        desk.close()


def batches(encoder: Encoder, set_name: str) -> Iterator[Conversation]:
    """Endless batches `[CONVERSATIONS_PER_STEP, length]`, padded on the right with token 0."""
    source = conversations(encoder, set_name)
    while True:
        group = list(islice(source, CONVERSATIONS_PER_STEP))
        columns = ([one.token_ids for one in group], [one.written for one in group])
        yield Conversation(*(pad_sequence(column, batch_first=True) for column in columns))


def loss_of(model: PreTrainedModel, head: Sequence[int], batch: Conversation) -> Tensor:
    """Mean negative log-likelihood of the assistant's tokens, in nats.

    The head's keys and values are computed once for the batch, without a gradient: it is twice as long as a
    conversation. The output layer runs only on positions that count.
    """
    decoder: Any = model.get_decoder()
    with torch.no_grad():
        layers = decoder(input_ids=torch.tensor([list(head)]), use_cache=True).past_key_values.layers
    rows = len(batch.token_ids)
    cache = DynamicCache([(one.keys.expand(rows, -1, -1, -1), one.values.expand(rows, -1, -1, -1)) for one in layers])
    hidden = decoder(input_ids=batch.token_ids, past_key_values=cache, use_cache=True).last_hidden_state
    predicts = batch.written[:, 1:]
    logits: Tensor = model.get_output_embeddings()(hidden[:, :-1][predicts])
    return cross_entropy(logits.float(), batch.token_ids[:, 1:][predicts])


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int, rate: float = RATE
) -> tuple[Any, list[float]]:
    """Train an adapter; returns the adapted model and the loss of each step, which is also printed."""
    torch.manual_seed(0)
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, settings, autocast_adapter_dtype=False)
    parameters = [one for one in adapted.parameters() if one.requires_grad]
    optimizer = AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    encoder, losses = Encoder(tokenizer), list[float]()
    for batch in islice(batches(encoder, "train"), steps):
        loss = loss_of(adapted, encoder.head, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        print(f"step {len(losses)} of {steps}: loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return adapted, losses


def main() -> None:
    """Train with the options of the command line, and write the adapter as `precedent_demo.adapted_target` reads it."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.train_adapter", description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter")
    options = parser.parse_args()
    try:
        model, tokenizer = load_target(DEMO_TARGET, dtype="float32", device="cpu")
        adapted, _ = train(model, tokenizer, options.steps)
    except PrecedentError as error:
        sys.exit(f"error: {error}")
    adapted.peft_config["default"].base_model_name_or_path = DEMO_TARGET
    adapted.to(torch.bfloat16).save_pretrained(options.out)


if __name__ == "__main__":
    main()
