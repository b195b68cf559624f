"""`bitwise=True` on a GPU: what steps and prompts cost, and whether drafted texts are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_bench.setting import Setting
from gpu_bench.steps import bushy, lengths, step_time
from precedent.config import SamplingParams
from precedent.sampling.rng import CounterRng
from precedent.sampling.target_rows import TargetRows
from precedent.target import TargetModel
from precedent.target.cuda.static_runner import StaticSettings
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder
from precedent.verify import verify

TOKENS, PROMPT, TEXT = (1, 16, 64), 512, 48
TEXTS, GREEDY = 8, SamplingParams(temperature=0.0)

Row = dict[str, Any]


def bitwise_times(setting: Setting) -> Iterator[Row]:
    """Steps of so many tokens and a prompt, with the promise and without; then texts, drafted and not."""
    room = 8192 if setting.small else 64 * 1024
    static = StaticSettings(arena_tokens=room, capture=setting.on_cuda)
    target = TargetModel(setting.model, bitwise=True, static=static)
    for length in lengths(setting):
        for tokens in TOKENS:
            setting.check_time()
            tree = bushy(tokens - 1)
            pair = [step_time(setting, each, length, tree) for each in (setting.static, target)]
            yield row(f"step of {tokens} behind {length}", *pair)
    prompts = [_prompt(setting, number) for number in range(TEXTS)]
    yield row(f"prompt of {PROMPT}", *(_prompt_time(setting, each, prompts[0]) for each in (setting.static, target)))
    yield {"what": "texts that equal plain decoding", "texts": TEXTS, "equal": _equal(target, prompts)}


def row(what: str, without: float, bitwise: float) -> Row:
    """A line of the table."""
    return {"what": what, "without_ms": without, "bitwise_ms": bitwise, "ratio": bitwise / without}


def _prompt(setting: Setting, seed: int) -> list[int]:
    choice, size = random.Random(seed), setting.model.config.vocab_size
    return [choice.randrange(size) for _ in range(64 if setting.small else PROMPT)]


def _prompt_time(setting: Setting, target: TargetModel, prompt: list[int]) -> float:
    slot = target.new_slot()

    def run() -> None:
        target.rewind(slot, 0)
        target.prefill(slot, prompt)

    return setting.milliseconds(run)


def _equal(target: TargetModel, prompts: Sequence[list[int]]) -> int:
    """How many texts come out the same when every step verifies a tree that holds the next tokens, and wrong ones."""
    count = 0
    for prompt in prompts:
        plain = _text(target, prompt, [])
        count += _text(target, prompt, plain) == plain
    return count


def _text(target: TargetModel, prompt: list[int], known: Sequence[int]) -> list[int]:
    """A greedy text; `known` is what its steps propose, in trees of seven tokens and as many wrong ones."""
    slot, text = target.new_slot(), list[int]()
    target.prefill(slot, prompt)
    while len(text) < TEXT:
        tree = _proposing(known[len(text) : len(text) + 7])
        rows = TargetRows(target.score([(slot, tree)])[0], tree, GREEDY)
        verdict = verify(tree, rows, "greedy", CounterRng(0, len(text)))
        target.commit(slot, tree, verdict.path, verdict.next_token)
        text += [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    return text[:TEXT]


def _proposing(tokens: Sequence[int]) -> CandidateTree:
    builder, node = TreeBuilder(), ROOT
    for token in tokens:
        builder.add_fixed(node, token ^ 1, "wrong")
        node = builder.add_fixed(node, token, "right")
    return builder.build() if tokens else EMPTY_TREE
