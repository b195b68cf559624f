"""A small hybrid beside an attention model of its size, both trained here on text that repeats itself.

    python tests/benchmarks/bench_hybrid.py --steps 500 [--json FILE]

Prints the tokens per step of both with the share of tokens that are the text's, since only models that say the same can
be compared, and what a step over a tree of 16 nodes (depth at most 6) costs beside a step over one token: score and
commit, medians of steps that alternate between the two models.
"""

from __future__ import annotations

import argparse
import random
from contextlib import closing
from statistics import median
from time import perf_counter
from typing import Any

import torch
from measurement import Measurement, json_option
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.testing.embedders import HashEmbedder
from precedent.testing.tiny_models import byte_tokenizer
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder

SIZE: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 258,
    "bos_token_id": 256,
    "pad_token_id": 256,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("qwen3", {}),
    "hybrid": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
}
"""Two layers of each kind in the hybrid; the same width and number of layers in the other."""

NAMES, THINGS = ("Ada", "Grace", "Emmy", "Rosalind"), ("lamp", "kettle", "shelf")
LENGTH, BATCH, WIDTH, DEPTH, REPEATS = 320, 4, 16, 6, 100
PROMPT, ANSWER = 200, 120


def text(choose: random.Random) -> str:
    """Lines about one order, which come back in turn: only the first one's name and thing cannot be foretold."""
    name, thing = choose.randrange(len(NAMES)), choose.randrange(len(THINGS))
    who, what, number = NAMES[name], THINGS[thing], 10_007 + 1_733 * (name * len(THINGS) + thing)
    line = f"Order {number} of {who}: one {what}. "
    turns = [f"{who} asks about order {number}. ", f"The {what} of order {number} is on its way to {who}. ", line]
    return line + "".join(turns * 4)


def trained(model_type: str, settings: dict[str, Any], steps: int) -> PreTrainedModel:
    """A model trained for so many steps; prints its loss."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZE, **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    choose, started = random.Random(0), perf_counter()
    loss = torch.zeros(())
    for _ in range(steps):
        rows = [list(text(choose).encode())[:LENGTH] for _ in range(BATCH)]
        batch = torch.tensor(rows)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    count = sum(parameter.numel() for parameter in model.parameters())
    seconds = perf_counter() - started
    print(f"  {model_type}: {count / 1e6:.1f} million parameters, {seconds:.0f} s, loss {loss.item():.3f}", flush=True)
    return model.eval().requires_grad_(False)


def tokens_per_step(model: PreTrainedModel) -> tuple[float, float]:
    """Over texts cut in the middle, from the prompt and from earlier answers; and the share of right tokens."""
    choose, tokens, steps, right = random.Random(1), 0, 0, 0
    with (
        SpeculationCache.open(None, embedder=HashEmbedder()) as cache,
        closing(Engine.load(model, tokenizer=byte_tokenizer(), cache=cache)) as engine,
    ):
        engine.planner.cost = CostCurve()
        for _ in range(16):
            told = list(text(choose).encode())[: PROMPT + ANSWER]
            names = SpeculationConfig(drafters=("recall", "prompt"), max_nodes=WIDTH)
            settings = SamplingParams(max_tokens=ANSWER)
            result = engine.submit(told[:PROMPT], settings, speculation=names, query="order").result()
            tokens, steps = tokens + len(result.token_ids), steps + result.stats.num_steps
            right += sum(map(int.__eq__, result.token_ids, told[PROMPT:]))
    return tokens / steps, right / tokens


def tree() -> CandidateTree:
    """16 nodes, at most 6 deep."""
    choose, builder, nodes = random.Random(2), TreeBuilder(), [(ROOT, 0)]
    while len(builder) < WIDTH:
        parent, depth = choose.choice(nodes[-4:] + nodes[:1])
        if depth < DEPTH:
            nodes.append((builder.add_fixed(parent, 97 + len(builder), "bench"), depth + 1))
    return builder.build()


def milliseconds(targets: dict[str, TargetModel]) -> dict[str, tuple[float, float]]:
    """Of a step over one token, and over the tree with its deepest path accepted: medians for each model."""
    wide = tree()
    path = max((wide.path_to(node) for node in range(len(wide))), key=len)
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(REPEATS):
        for name, target in targets.items():
            for candidates, accepted in ((EMPTY_TREE, ()), (wide, path)):
                slot = target.new_slot()
                target.prefill(slot, list(range(40, 140)) * 3)
                started = perf_counter()
                target.score([(slot, candidates)])
                target.commit(slot, candidates, accepted, 5)
                times.setdefault((name, len(candidates)), []).append(1e3 * (perf_counter() - started))
    return {name: (median(times[name, 0]), median(times[name, WIDTH])) for name in targets}


def main() -> None:
    """Train, count and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps of each model")
    json_option(parser)
    given = parser.parse_args()
    measurement, found = Measurement(), dict[str, dict[str, float]]()
    print("training")
    models = {name: trained(*settings, given.steps) for name, settings in MODELS.items()}
    print("tokens per step")
    for name, model in models.items():
        tokens, right = tokens_per_step(model)
        found[name] = {"tokens_per_step": tokens, "share_of_right_tokens": right}
        print(f"  {name}: {tokens:.2f}, {right:.1%} of its tokens are the text's", flush=True)
    print("a step over 16 nodes beside a step over one token")
    for name, (one, many) in milliseconds({name: TargetModel(model) for name, model in models.items()}).items():
        found[name] |= {"one_token_ms": one, "sixteen_nodes_ms": many, "ratio": many / one}
        print(f"  {name}: {many:.2f} ms / {one:.2f} ms = {many / one:.2f}")
    print(f"  hybrid against attention: {found['hybrid']['ratio'] / found['attention']['ratio']:.2f}")
    measurement.write(given.json, found)


if __name__ == "__main__":
    main()
