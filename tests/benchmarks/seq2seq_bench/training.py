"""Trains a translator from scratch on pairs that are made as it goes: no sentence is seen twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from seq2seq_bench.language import pair, words

PAD, END = 0, 1
BATCH = 32
HELD_OUT = 10_000_000
"""Seeds from here on are for measuring."""

TARGET = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
DRAFT = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of both languages; an end token behind each text."""
    vocabulary = ["<pad>", "</s>", "<unk>", *dict.fromkeys([word for side in words() for word in side])]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def trained(
    tokenizer: PreTrainedTokenizerFast, shape: dict[str, int], *, steps: int, seed: int, report: Callable[[str], None]
) -> PreTrainedModel:
    """A T5 of this shape after `steps` batches."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(tokenizer), decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", **shape,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        loss = model(**_batch(tokenizer, range(step * BATCH, (step + 1) * BATCH))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0:
            report(f"step {step + 1} of {steps}: loss {loss.item():.3f}")
    model.generation_config = GenerationConfig(decoder_start_token_id=PAD, eos_token_id=END, pad_token_id=PAD)
    return model.eval()


def _batch(tokenizer: PreTrainedTokenizerFast, seeds: Sequence[int]) -> dict[str, Tensor]:
    pairs = [pair(seed) for seed in seeds]
    sources, targets = (
        _padded([tokenizer.encode(one[side]) for one in pairs], fill) for side, fill in ((0, PAD), (1, -100))
    )
    return {"input_ids": sources, "attention_mask": (sources != PAD).long(), "labels": targets}


def _padded(rows: list[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])
