"""Shows how one forward of the order desk's block draft becomes a tree, and what the target takes of it.

    python examples/block_tree.py

The order desk's target is smollm2-135m-instruct with an adapter; its block draft fills eight positions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from precedent.config import SamplingParams
from precedent.drafters.base import Candidates
from precedent.drafters.request import Request
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent.tree import EMPTY_TREE
from precedent_demo import adapted_target, block_folder
from precedent_drafts.block_draft import load_block_draft
from precedent_drafts.block_drafter import BlockDrafter, BlockModel, BlockSession

CONVERSATION = [
    {"role": "system", "content": "You are the assistant of an order desk."},
    {"role": "user", "content": "Hello, I would like to cancel my order."},
]
GIVEN, NODES = 3, 12
"""Tokens of the answer that are known already, and nodes of the tree."""


def plain(target: TargetModel, prompt: list[int], count: int) -> list[int]:
    """The next tokens of plain greedy decoding."""
    slot, found = target.new_slot(), list[int]()
    target.prefill(slot, prompt)
    for _ in range(count):
        token = int(target.plain_step(slot)[0].argmax())
        target.commit(slot, EMPTY_TREE, (), token)
        found.append(token)
    return found


def drafted(target: TargetModel, draft: BlockModel, text: list[int]) -> Candidates:
    """The likeliest paths through the block behind a text."""
    slot = target.new_slot()
    target.prefill(slot, text)
    asked = Request("shown", tuple(text), SamplingParams(), target_slot=lambda: slot)
    session = BlockDrafter(draft).begin(asked)
    assert isinstance(session, BlockSession)
    return session.filled(NODES)[1]


def lines_of(found: Candidates, parent: int, answer: list[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The nodes below one, each with its estimate; `answer` is what the target says there, empty off its path."""
    for node, token in enumerate(found.token_ids):
        if found.parents[node] == parent:
            taken = answer[:1] == [token]
            yield f"{decode([token])!r} {found.estimates[node]:.2f}{'  <- the target says so' if taken else ''}"
            for line in lines_of(found, node, answer[1:] if taken else [], decode):
                yield f"  {line}"


def main() -> None:
    """Draft, and print the tree."""
    model, tokenizer = load_target(str(adapted_target()))
    target = TargetModel(model)
    block = BlockModel(load_block_draft(block_folder(), model), target)
    text = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=True, return_dict=False)
    answer = plain(target, text, GIVEN + 8)
    found = drafted(target, block, [*text, *answer[:GIVEN]])
    print(f"behind: {tokenizer.decode(answer[:GIVEN])!r}")
    print(*lines_of(found, -1, answer[GIVEN:], tokenizer.decode), sep="\n")


if __name__ == "__main__":
    main()
