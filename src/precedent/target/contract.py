"""`Target`, the model as the engine and the decode loop know it: prefill, score trees, commit paths, go back.

`TargetModel` implements it with torch; packages of the group `precedent.models` may bring others
(`precedent.target.support`). `precedent_testing.target_contract` tests what is promised here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from precedent.errors import ContextOverflowError, PromptError, UnsupportedError
from precedent.runtime.team import TEAM, Team
from precedent.tree import EMPTY_TREE, CandidateTree, chain

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

__all__ = ["NOTHING_PENDING", "Capabilities", "Commit", "Slot", "Target"]

PREFILL_CHUNK = 512
"""Tokens per prefill forward: bounds the memory of activations at no measurable cost."""

NOTHING_PENDING = -1
"""`Slot.pending` while a prompt is still being computed."""

UNTIMED = 3
"""Untimed forwards per width on an accelerator: the second is captured as a graph, the third replays it."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """One sequence's place in a target: its committed tokens, and the pending one, chosen but not computed yet.

    `kv` is what the target stores of the committed tokens; only the target that made the slot reads it. It frees what
    it holds when it is garbage collected, on whichever thread. With `one_path` a scored tree may not branch.
    """

    kv: Any
    token_ids: list[int] = field(default_factory=list)
    pending: int = NOTHING_PENDING
    one_path: bool = False


Commit = tuple[Slot, CandidateTree, Sequence[int], int]
"""A slot, the tree that was scored, its accepted nodes, and the token that becomes pending."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can do.

    `most_leaves` is how many leaves a tree may have: 1 for targets that follow chains only, None without a bound.
    `most_rows` bounds the rows of one sequence in a forward, its pending token included. `bitwise` targets round a row
    the same way whatever is computed with it. `hidden_states`: drafters and judges can read the last layer's output.
    `rewinds_anywhere`: a sequence can go back to every earlier length, not only to some. `fixed_memory`: all sequences
    together take at most `arena_bytes`, in any places of them.
    """

    most_leaves: int | None = None
    most_rows: int | None = None
    bitwise: bool = False
    hidden_states: bool = False
    rewinds_anywhere: bool = True
    fixed_memory: bool = False


class Target(ABC):
    """A language model that scores candidate trees behind committed tokens.

    All calls come from one thread at a time. Whatever fails leaves every slot as it was, and what was scored but not
    committed can always be discarded. Token ids are 0 to `vocab_size - 1`. `context_length` bounds prompt and answer
    together, in tokens.
    """

    vocab_size: int
    context_length: int

    config: PreTrainedConfig
    """The checkpoint's configuration."""

    generation_config: GenerationConfig | None
    """What the checkpoint says about sampling and end tokens, if anything."""

    device: torch.device
    """Where `score` returns its logits."""

    backend = "precedent"
    """What computes it, as `EngineOptions.backend` names it."""

    model: PreTrainedModel | None = None
    """The torch model, for drafts that share its modules; None if there is none."""

    arena_bytes: int = 0
    """Bytes set aside at the start for all sequences; where rows round alike, a request without room there waits."""

    keeps_hidden_states: bool = False
    """Whether `hidden_states` has something to return."""

    encodes_prompt: bool = False
    """Whether an encoder reads the prompt, so that a slot holds only the answer's tokens."""

    answer_start: tuple[int, ...] = ()
    """Tokens that stand before an answer's first where `encodes_prompt`."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this target can do."""

    @abstractmethod
    def weights(self) -> Mapping[str, Any]:
        """Tensors by name; the cache derives the model's fingerprint from them and from `config`."""

    @abstractmethod
    def new_slot(self) -> Slot:
        """An empty slot."""

    @abstractmethod
    def fork(self, slot: Slot, length: int, room: int = 0) -> Slot:
        """A new slot with the first `length` tokens, of which `nearest` holds, and room for `room`; `slot` stays."""

    @abstractmethod
    def continue_prefill(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> bool:
        """Compute at most `max_tokens` more tokens of the prompt passed to `begin_prefill`.

        True when all but the last prompt token are committed and the last is pending.
        """

    @abstractmethod
    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """Logits after the pending token and after every node, `[num_nodes + 1, vocab_size]` for each sequence.

        The logits may be overwritten by the next forward. Nothing is committed: the next `commit_all` or `discard`
        decides. Raises ValueError for a slot whose prompt is not complete.
        """

    def score_prompt(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> Tensor:
        """As `continue_prefill`, but returns the logits after each token that it computes, `[rows, vocab_size]`.

        The slot must have been empty at `begin_prefill`, or not all rows are computed. The logits may be overwritten by
        the next forward. Not for targets that encode prompts.
        """
        done, goal = len(slot.token_ids), len(prompt_ids) - 1
        if slot.pending == NOTHING_PENDING:
            self.reserve(slot, len(prompt_ids))
            self.continue_prefill(slot, prompt_ids[: done + 1], 1)  # computes nothing: its last token becomes pending
        end = min(done + max_tokens, goal)
        piece = chain(prompt_ids[done + 1 : end])
        (logits,) = self.score([(slot, piece)])
        self.commit(slot, piece, range(len(piece)), prompt_ids[end])
        return logits

    @abstractmethod
    def commit_all(self, batch: Sequence[Commit]) -> list[Exception | None]:
        """Keep each sequence's pending token and accepted path; its next token becomes pending.

        Returns each sequence's error, or None: one that fails does not disturb the others.
        """

    @abstractmethod
    def rewind(self, slot: Slot, length: int) -> int:
        """Forget all committed tokens from `length` on, and everything scored; returns how many remain (`nearest`)."""

    @abstractmethod
    def discard(self, slot: Slot) -> None:
        """Forget everything scored but not committed; may be called at any time, also after a failed forward."""

    @abstractmethod
    def slot_bytes(self, slot: Slot) -> int:
        """Bytes that a slot holds now."""

    @abstractmethod
    def request_bytes(self, prompt_tokens: int, answer_tokens: int, tree_tokens: int, num_rows: int = 0) -> int:
        """The most bytes that a request holds, with the largest tree behind its answer.

        `num_rows` are the rows of a step, of which layers with a state keep something until a path is committed.
        """

    @property
    def team(self) -> Team:
        """Chooses how many threads compute."""
        return TEAM

    @property
    def threads(self) -> int:
        """Threads of the last forward."""
        return 1

    @property
    def settled(self) -> bool:
        """Whether the time of the last `score` says what such a step will cost: not if something was compiled."""
        return True

    def nearest(self, slot: Slot, length: int) -> int:
        """The most tokens, up to `length`, that the slot can go back to."""
        return length

    def reserve(self, slot: Slot, num_tokens: int) -> None:  # noqa: B027
        """Make room for `num_tokens` in all, so that a long sequence is not copied repeatedly."""

    def tokens_in_arena(self, num_bytes: int) -> int:
        """Tokens of a request of so many bytes that must fit in the arena; 0 if memory may grow."""
        return 0

    def has_room(self, num_tokens: int) -> bool:
        """Whether the arena has room for another sequence of that many tokens."""
        return True

    def save(self, slot: Slot, num_tokens: int) -> list[Tensor]:
        """Copies, in main memory, of what the slot stores of its first `num_tokens`, of which `nearest` holds.

        Raises UnsupportedError where it cannot be copied.
        """
        raise self._saves_nothing()

    def saved_bytes(self, num_tokens: int) -> int:
        """Bytes of what `save` returns."""
        return self.request_bytes(num_tokens, 0, 0)

    def restore(self, token_ids: Sequence[int], saved: Sequence[Tensor], room: int = 0) -> Slot:
        """A new slot of these tokens from what `save` returned. Raises ValueError for what does not fit this target."""
        raise self._saves_nothing()

    def identity(self) -> dict[str, object]:
        """What must be equal for another process to restore what this target saved. Raises UnsupportedError."""
        raise self._saves_nothing()

    def _saves_nothing(self) -> UnsupportedError:
        return UnsupportedError(f"keep_prefixes=True is not available: {type(self).__name__} cannot save prefixes")

    def keep_hidden_states(self, *, after_norm: bool = True) -> object:
        """From now on keep the last layer's output of every token; call it before the first slot exists.

        Raises UnsupportedError, naming why, where they cannot be kept.
        """
        raise UnsupportedError(
            f"{type(self).__name__} keeps no hidden states, which some drafters and judges read: leave the reader out"
        )

    def hidden_states(self, slot: Slot, first: int, end: int) -> Tensor:
        """Last layer's output for these tokens, scored ones behind the committed included, `[end - first, size]`."""
        raise UnsupportedError(f"{type(self).__name__} keeps no hidden states")

    def most_answer_tokens(self, prompt_tokens: int) -> int:
        """The longest answer to a prompt of so many tokens."""
        return self.context_length - prompt_tokens

    def prefill(self, slot: Slot, prompt_ids: Sequence[int], *, chunk: int = PREFILL_CHUNK) -> int:
        """Bring `slot` to `prompt_ids`, the last one pending; returns how many tokens it held already.

        A forward computes at most `chunk` tokens. A failed prefill leaves the slot at the last whole chunk. Raises what
        `begin_prefill` raises.
        """
        reused = self.begin_prefill(slot, prompt_ids)
        while not self.continue_prefill(slot, prompt_ids, chunk):
            pass
        return reused

    def begin_prefill(self, slot: Slot, prompt_ids: Sequence[int]) -> int:
        """Keep the longest common prefix of `prompt_ids` and the slot, rewind the rest; returns how much was kept.

        Computes nothing: `continue_prefill` does. Raises PromptError when the prompt is empty, ContextOverflowError
        when it does not fit.
        """
        if not prompt_ids:
            raise PromptError("the prompt is empty: give at least one token")
        if len(prompt_ids) >= self.context_length:
            raise ContextOverflowError(
                f"the prompt is too long: {len(prompt_ids)} tokens, the model's context holds {self.context_length}: "
                "shorten the conversation or the tool results"
            )
        reused = self.rewind(slot, common_prefix(slot.token_ids, prompt_ids[:-1]))
        slot.pending = NOTHING_PENDING
        return reused

    def commit(self, slot: Slot, tree: CandidateTree, path: Sequence[int], next_token: int) -> None:
        """`commit_all` for one sequence; raises its error."""
        (error,) = self.commit_all([(slot, tree, path, next_token)])
        if error is not None:
            raise error

    def plain_step(self, slot: Slot) -> Tensor:
        """Logits after the pending token alone, `[1, vocab_size]`."""
        return self.score([(slot, EMPTY_TREE)])[0]

    def measure_costs(self, num_rows: int) -> float:
        """Milliseconds of one forward of `num_rows` rows after a short prefix.

        On an accelerator some untimed ones come first: the first forwards of a width compile kernels and capture
        graphs, and prompts are still being computed when their call has returned.
        """
        slot, started = self.new_slot(), 0.0
        self.prefill(slot, [0] * 33)
        for _ in range(1 if self.device.type == "cpu" else 1 + UNTIMED):
            started = perf_counter()
            self.score([(slot, chain([0] * (num_rows - 1)))])[0][0, 0].item()
            self.discard(slot)
        return (perf_counter() - started) * 1e3


def common_prefix(left: Sequence[int] | NDArray[np.int64], right: Sequence[int] | NDArray[np.int64]) -> int:
    """Length of the longest common prefix, in tokens; compares growing pieces, so that long inputs run at C speed."""
    length, start, width = min(len(left), len(right)), 0, 64
    while start < length:
        one, other = left[start : start + width], right[start : start + width]
        one, other = one[: length - start], other[: length - start]
        if (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)) or list(one) != list(other):
            differing = np.flatnonzero(np.asarray(one) != np.asarray(other))
            if differing.size:
                return start + int(differing[0])
        start, width = start + width, 8 * width
    return length
