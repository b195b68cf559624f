"""A small hybrid and an attention model of its size, both trained here on text that repeats itself.

    python benchmarks/bench_hybrid.py [--steps 500] [--json FILE]

Reports the tokens per step of both, with the share of tokens that are the text's (only models that say the same can be
compared), and the cost of a step over a tree of 16 nodes relative to a step over one token: score and commit, medians
of alternating steps.
"""

from __future__ import annotations

import random
from argparse import Namespace
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from measuring import alternating, options, run
from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

SIZE: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "eos_token_id": 258, "bos_token_id": 256, "pad_token_id": 256,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"attention": ("qwen3", {}), "hybrid": ("qwen3_5_text", LINEAR)}
NAMES, THINGS = ("Ada", "Grace", "Emmy", "Rosalind"), ("lamp", "kettle", "shelf")
LENGTH, BATCH, WIDTH, DEPTH, REPEATS, PROMPT, ANSWER = 320, 4, 16, 6, 100, 200, 120


def text(choose: random.Random) -> str:
    """Write lines about one order that recur in turn: only the first one's name and thing cannot be predicted."""
    name, thing = choose.randrange(len(NAMES)), choose.randrange(len(THINGS))
    who, what, number = NAMES[name], THINGS[thing], 10_007 + 1_733 * (name * len(THINGS) + thing)
    line = f"Order {number} of {who}: one {what}. "
    turns = [f"{who} asks about order {number}. ", f"The {what} of order {number} is on its way to {who}. ", line]
    return line + "".join(turns * 4)


def trained(model_type: str, settings: dict[str, Any], steps: int) -> PreTrainedModel:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZE, **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    choose = random.Random(0)
    for _ in range(steps):
        batch = torch.tensor([list(text(choose).encode())[:LENGTH] for _ in range(BATCH)])
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def tokens_per_step(model: PreTrainedModel) -> dict[str, float]:
    """Over texts cut in the middle, drafted from the prompt and from earlier answers."""
    choose, tokens, steps, right = random.Random(1), 0, 0, 0
    names, settings = (
        SpeculationConfig(drafters=("recall", "prompt"), max_nodes=WIDTH),
        SamplingParams(max_tokens=ANSWER),
    )
    with (
        SpeculationCache.open(None, embedder=HashEmbedder()) as cache,
        closing(Engine.load(model, tokenizer=byte_tokenizer(), cache=cache)) as engine,
    ):
        engine.planner.cost = CostCurve()
        for _ in range(16):
            told = list(text(choose).encode())[: PROMPT + ANSWER]
            result = engine.submit(told[:PROMPT], settings, speculation=names, query="order").result()
            tokens, steps = tokens + len(result.token_ids), steps + result.stats.num_steps
            right += sum(map(int.__eq__, result.token_ids, told[PROMPT:]))
    return {"tokens_per_step": tokens / steps, "share_of_right_tokens": right / tokens}


def step_times(targets: dict[str, TargetModel]) -> dict[str, dict[str, float]]:
    """Milliseconds of a step over one token, and over the tree with its deepest path accepted."""
    choose, builder, nodes = random.Random(2), TreeBuilder(), [(ROOT, 0)]
    while len(builder) < WIDTH:
        parent, depth = choose.choice(nodes[-4:] + nodes[:1])
        if depth < DEPTH:
            nodes.append((builder.add_fixed(parent, 97 + len(builder), "bench"), depth + 1))
    wide = builder.build()
    path = max((wide.path_to(node) for node in range(len(wide))), key=len)

    def step(target: TargetModel, slot: Any, tree: CandidateTree, accepted: Any) -> None:
        target.score([(slot, tree)])
        target.commit(slot, tree, accepted, 5)

    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(REPEATS):
        ways: dict[Any, Any] = {}
        for name, target in targets.items():
            for what, tree, accepted in (("one_token_ms", EMPTY_TREE, ()), ("sixteen_nodes_ms", wide, path)):
                slot = target.new_slot()
                target.prefill(slot, list(range(40, 140)) * 3)
                ways[name, what] = partial(step, target, slot, tree, accepted)
        for way, (taken,) in alternating(ways, 1).items():
            times.setdefault(way, []).append(taken)  # type: ignore[arg-type]
    found: dict[str, dict[str, float]] = {name: {} for name in targets}
    for (name, what), each in times.items():
        found[name][what] = median(each) * 1e3
    return {name: each | {"ratio": each["sixteen_nodes_ms"] / each["one_token_ms"]} for name, each in found.items()}


def measure(given: Namespace) -> dict[str, Any]:
    models = {name: trained(*settings, given.steps) for name, settings in MODELS.items()}
    times = step_times({name: TargetModel(model) for name, model in models.items()})
    return {name: tokens_per_step(model) | times[name] for name, model in models.items()}


if __name__ == "__main__":
    run(options(__doc__, steps=500), measure)
