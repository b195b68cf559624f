"""How far quantization="int8" and "int4" are from float32: the divergence of the next token's distribution.

    python benchmarks/bench_quantization.py [--target FOLDER] [--tokens 400] [--json FILE]

Reads the beginning of README.md; the target is the order desk's unless another one is given. Inputs of products are
float32, so that only the weights differ; bfloat16 is shown beside them, with its products in bfloat16.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

from measuring import ROOT, options, run
from precedent.target.load.loading import load_target


def log_probs(target: str, tokens: int, **how: Any) -> Tensor:
    """Of the next token after each one, `[tokens, vocab_size]`."""
    model, tokenizer = load_target(target, device="cpu", **how)
    ids = tokenizer((ROOT / "README.md").read_text(encoding="utf-8")).input_ids[:tokens]
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def measure(given: Namespace) -> dict[str, dict[str, float]]:
    if given.target is None:
        from precedent_demo import adapted_target

        given.target = str(adapted_target())
    plain, found = log_probs(given.target, given.tokens, dtype="float32"), dict[str, dict[str, float]]()
    for name, how in {
        "bfloat16": {"dtype": "bfloat16"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
    }.items():
        other = log_probs(given.target, given.tokens, **how)
        found[name] = {
            "nats": float((plain.exp() * (plain - other)).sum(-1).mean()),
            "same_top": float((plain.argmax(-1) == other.argmax(-1)).float().mean()),
        }
    return found


if __name__ == "__main__":
    run(options(__doc__, target=str, tokens=400), measure)
