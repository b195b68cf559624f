"""One step: against the floor, with and without a graph, its attention by every variant, and its verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_bench.setting import Setting
from precedent.config import SamplingParams
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.target import Slot, TargetModel
from precedent.target.cuda.ordered_attention import ORDERED
from precedent.target.cuda.split_attention import VARIANTS, StaticRows
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Verdict
from precedent.verify.ahead import Ahead, Scored, computed_alike, read_together

TOKENS, LENGTHS = (1, 8, 16, 32, 64), (1024, 4096, 16_384)
BATCHES = (1, 8, 32)
NUM_DRAWS = 6
"""Of a draft model, beside what a cache proposes."""

Row = dict[str, Any]


def step_times(setting: Setting) -> Iterator[Row]:
    """A step of so many tokens behind so many: as a graph, the same code without, and the ordinary forward."""
    for length in lengths(setting):
        for tokens in TOKENS:
            setting.check_time()
            yield {"length": length, "tokens": tokens, **_step_row(setting, length, tokens)}


def lengths(setting: Setting) -> tuple[int, ...]:
    """Committed tokens before a step."""
    return (64, 200) if setting.small else LENGTHS


def _step_row(setting: Setting, length: int, tokens: int) -> Row:
    tree, floor = bushy(tokens - 1), setting.floor(length)
    graph = step_time(setting, setting.static, length, tree)
    graphs, setting.static.static.graphs = setting.static.static.graphs, None
    without = step_time(setting, setting.static, length, tree)
    setting.static.static.graphs = graphs
    times = {"graph_ms": graph, "same_code_ms": without, "ordinary_ms": step_time(setting, setting.plain, length, tree)}
    flop = 2.0 * tokens * setting.weight_bytes / setting.model.dtype.itemsize
    work = {"flop": flop, "bytes": floor / 1e3 * setting.bandwidth}
    return {**times, "floor_ms": floor, "times_the_floor": graph / floor, **work}


def step_time(setting: Setting, target: TargetModel, length: int, tree: CandidateTree) -> float:
    """Milliseconds of scoring a tree behind so many tokens."""
    slot = setting.slot_of(target, length, len(tree))

    def run() -> None:
        target.score([(slot, tree)])
        target.discard(slot)

    return setting.milliseconds(run)


def batch_times(setting: Setting) -> Iterator[Row]:
    """Plain steps and steps of 16 tokens each, of several sequences at once, as graphs."""
    length = lengths(setting)[0]
    for batch in BATCHES:
        for tokens in (1, 16):
            setting.check_time()
            slots = [setting.slot_of(setting.static, length, tokens) for _ in range(batch)]
            taken = setting.milliseconds(lambda: _score_all(setting.static, slots, bushy(tokens - 1)))  # noqa: B023
            floor = setting.floor(length, batch)
            yield {
                "batch": batch,
                "tokens": tokens,
                "length": length,
                "graph_ms": taken,
                "times_the_floor": taken / floor,
            }


def _score_all(target: TargetModel, slots: list[Slot], tree: CandidateTree) -> None:
    target.score([(slot, tree) for slot in slots])
    for slot in slots:
        target.discard(slot)


def bushy(num_nodes: int, draft_rows: Sequence[Tensor] = ()) -> CandidateTree:
    """A tree of four chains below the root, what a cache proposes, beside a chain sampled from a draft model's rows."""
    builder, ends, node = TreeBuilder(), [ROOT] * 4, ROOT
    for number in range(num_nodes - len(draft_rows)):
        ends[number % 4] = builder.add_fixed(ends[number % 4], number % 400, "bench")
    for row in draft_rows:
        node = builder.add_sampled(node, 410, Sampled(row, builder.children(node)), "draft")
    return builder.build() if num_nodes else EMPTY_TREE


def attention_times(setting: Setting) -> Iterator[Row]:
    """One layer's attention by every variant, in microseconds, and its relative error against float64."""
    for length in lengths(setting):
        for tokens in TOKENS:
            yield from _attention_rows(setting, length, tokens)


def _attention_rows(setting: Setting, length: int, tokens: int) -> Iterator[Row]:
    config, tree = setting.model.config, bushy(tokens - 1)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim, rows = config.hidden_size // heads, one_sequence(setting.device, length, tokens, tree)
    sizes = (1, heads, tokens, dim), (kv_heads, length + tokens, dim), (kv_heads, length + tokens, dim)
    query, keys, values = (torch.randn(size, device=setting.device, dtype=setting.model.dtype) for size in sizes)
    exact = VARIANTS["split"](query.double(), keys.double(), values.double(), rows, dim**-0.5)
    floor = (keys.nbytes + values.nbytes) / setting.bandwidth * 1e6
    for name, variant in (VARIANTS | ORDERED).items():
        setting.check_time()
        row: Row = {"length": length, "tokens": tokens, "variant": name, "floor_us": floor}
        try:
            found = variant(query, keys, values, rows, dim**-0.5).double()
            row["error"] = float((found - exact).norm() / exact.norm())
            taken = setting.milliseconds(lambda: variant(query, keys, values, rows, dim**-0.5))  # noqa: B023
            yield {**row, "us": 1e3 * taken}
        except Exception as error:  # one variant alone: Triton may be absent
            yield {**row, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}


def one_sequence(device: torch.device, length: int, tokens: int, tree: CandidateTree) -> StaticRows:
    """The layout of one sequence at the beginning of an arena."""
    ancestors = torch.eye(tokens, dtype=torch.bool)
    ancestors[:, 0] = True
    if tree:
        ancestors[1:, 1:] = torch.from_numpy(tree.ancestors)
    within, zero = torch.arange(tokens, device=device), torch.zeros(1, dtype=torch.long, device=device)
    return StaticRows(
        row_of=within[None],
        slot_of=within,
        first_rows=zero,
        counts=zero + tokens,
        starts=zero,
        lengths=zero + length,
        ancestors=ancestors[None].to(device),
        longest=length + tokens,
    )


def verification_times(setting: Setting) -> Iterator[Row]:
    """Logits to verdicts as the decode loop comes to them, the read included: milliseconds, and the share of a step."""
    nodes, vocabulary = 64, setting.model.config.vocab_size
    for batch in (1, 8):
        slots = [setting.slot_of(setting.static, lengths(setting)[0], nodes) for _ in range(batch)]
        tree = bushy(nodes)
        step = setting.milliseconds(lambda: _score_all(setting.static, slots, tree))  # noqa: B023
        logits = torch.randn(batch, nodes + 1, vocabulary, device=setting.device, dtype=setting.model.dtype)
        drafted = torch.randn(NUM_DRAWS, vocabulary, device=setting.device).softmax(1)
        for mode, temperature, draft_rows in (
            ("traversal", 0.7, []),
            ("traversal", 0.7, list(drafted)),
            ("greedy", 0.0, []),
        ):
            setting.check_time()
            params, trees = SamplingParams(temperature=temperature), [bushy(nodes, draft_rows)] * batch
            taken = setting.milliseconds(lambda: verdicts(trees, list(logits), params, mode))  # noqa: B023
            yield {
                "mode": mode,
                "sequences": batch,
                "nodes": nodes,
                "draws": len(draft_rows),
                "vocabulary": vocabulary,
                "ms": taken,
                "share_of_step": taken / step,
            }


def verdicts(
    trees: Sequence[CandidateTree], scored: Sequence[Tensor], params: SamplingParams, mode: str
) -> list[Verdict]:
    """All verdicts, read at once."""
    found = [
        Scored(tree, TargetRows(logits, tree, params), CounterRng(1, 1), mode)
        for tree, logits in zip(trees, scored, strict=True)
    ]
    read_together([Ahead(together) for together in computed_alike(found)])
    return [each.verdict() for each in found]
