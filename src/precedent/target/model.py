"""The torch target: a causal language model of transformers behind the contract `Target`.

Scoring runs the pending token and the whole candidate tree behind it in one forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import ConfigError, UnsupportedError
from precedent.runtime.team import Team
from precedent.target import bitwise as same_bits
from precedent.target import support
from precedent.target.contract import NOTHING_PENDING, PREFILL_CHUNK, Capabilities, Commit, Slot, Target
from precedent.target.examine import examine
from precedent.target.fingerprints import identity_of
from precedent.target.hidden_states import HiddenStates, final_states_of, layer_outputs_of
from precedent.target.kv.cache import Arena, KVCache
from precedent.target.kv.layer_kinds import context_length
from precedent.target.kv.rows import chain_rows, tree_rows
from precedent.target.support import ModelSource, TargetOptions, layer_state_of, missing, support_for
from precedent.tree import CandidateTree


class TargetModel(Target):
    """Wraps an `AutoModelForCausalLM`. Raises UnsupportedError for layers that cannot be rewound.

    `runner` calls the model; `kv_shape` is what its layers store per token. With `bitwise`, a token's logits and stored
    values are bit-identical whatever is computed beside it (`target.bitwise`): no forward has more than `most_rows`
    rows. With `cuda_graphs`, forwards are padded to one of a few sizes and replayed as CUDA graphs; pass True, or the
    settings of the package that makes the graphs. Raises UnsupportedError for a model that allows neither, and
    ConfigError where the package that computes them is not installed.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, *, bitwise: bool = False, cuda_graphs: object = False) -> None:
        layer_state = layer_state_of(model.config)
        check_one_process(model)
        self.model, self.bitwise = model.eval(), bitwise
        for package in support.installed():
            package.prepare(self.model, bitwise=bitwise)
        self.runner, self.kv_shape, self.vocab_size = examine(self.model, layer_state)
        self._read_model()
        self.context_length = context_length(model.config.get_text_config())
        options = TargetOptions(bitwise=bitwise, cuda_graphs=cuda_graphs)
        if not bitwise:
            self._find_backends(options)
            return
        self.runner.most_rows = same_bits.MOST_ROWS
        lengths = same_bits.settle(self.runner, self.kv_shape, options)
        self._find_backends(options)
        same_bits.prove(self, lengths)

    def _read_model(self) -> None:
        self.config, self.device = self.model.config, self.runner.device
        self.generation_config = getattr(self.model, "generation_config", None)
        self.one_path = self.runner.only_chains is not None  # whether a tree may only be a single path

    def run_as_graphs(self, cuda_graphs: object) -> None:
        """From now on replay forwards as CUDA graphs; call it before the first slot exists. Raises UnsupportedError."""
        self._find_backends(TargetOptions(cuda_graphs=cuda_graphs))

    def _find_backends(self, options: TargetOptions) -> None:
        """Let the installed packages compute what they can. Raises ConfigError if none makes the graphs asked for."""
        found = (package.backend(self.runner, self.kv_shape, options) for package in support.installed())
        self.runner.backends = [backend for backend in found if backend is not None]
        self.arena_bytes = 0 if self.arena is None else self.arena.nbytes
        if options.cuda_graphs and self.arena is None:
            raise missing("cuda_graphs", "cuda_graphs=True")

    def keep_hidden_states(self, *, after_norm: bool = True) -> HiddenStates:
        """Keep the last layer's output of every token from now on, read after the final norm or before it."""
        self._check_keeps()
        if self.runner.hidden is None:
            self.runner.hidden, self.keeps_hidden_states = final_states_of(self, after_norm=after_norm), True
        return self.runner.hidden

    def keep_layer_outputs(self, numbers: Sequence[int]) -> HiddenStates:
        """Keep the outputs of these layers, counted from 1, of every token from now on.

        Call it before the first slot exists. Raises UnsupportedError, naming why, where they cannot be kept, and
        ConfigError for layers that the model lacks, or where others are kept already.
        """
        self._check_keeps()
        if self.runner.outputs is None:
            self.runner.outputs = layer_outputs_of(self, numbers)
        if self.runner.outputs.numbers != tuple(numbers):
            raise ConfigError(f"this target keeps the layers {self.runner.outputs.numbers}, not {tuple(numbers)}")
        return self.runner.outputs

    def _check_keeps(self) -> None:
        if self.arena is not None:
            raise UnsupportedError(
                "forwards of fixed size (cuda_graphs=True, or bitwise=True on a GPU) keep no hidden states, which some "
                "drafters and judges read: leave that option or the reader out"
            )

    def hidden_states(self, slot: Slot, first: int, end: int) -> Tensor:
        """Hidden states of these rows of a slot's KV cache, `[end - first, hidden_size]`, without a copy."""
        assert self.runner.hidden is not None, "call keep_hidden_states first"
        return self.runner.hidden.of(slot.kv, first, end)

    @property
    def capabilities(self) -> Capabilities:
        """What this target can do."""
        return Capabilities(
            most_leaves=1 if self.one_path else None,
            most_rows=self.runner.most_rows,
            bitwise=self.bitwise,
            hidden_states=self.arena is None,
            rewinds_anywhere=not self.kv_shape.state.nbytes,
        )

    @property
    def team(self) -> Team:
        """Chooses the number of threads of a forward."""
        return self.runner.team

    @property
    def threads(self) -> int:
        """Threads of the last forward."""
        return self.runner.threads

    @property
    def settled(self) -> bool:
        """Whether the last forward took as long as such a forward will again."""
        return self.runner.settled

    @property
    def arena(self) -> Arena | None:
        """The memory of all sequences where forwards have fixed sizes; None otherwise."""
        return next((backend.arena for backend in self.runner.backends if backend.arena is not None), None)

    def tokens_in_arena(self, num_bytes: int) -> int:
        """Tokens of a request that must fit in the arena; 0 if its keys and values may grow and move."""
        return num_bytes // self.kv_shape.row_bytes if self.bitwise and self.arena is not None else 0

    def has_room(self, num_tokens: int) -> bool:
        """Whether the arena has a contiguous place for that many tokens."""
        return self.arena is None or self.arena.has_room(num_tokens)

    def weights(self) -> Mapping[str, Any]:
        """The state dict, for reading the model's weights."""
        weights: Mapping[str, Any] = self.model.state_dict()
        return weights

    def identity(self) -> dict[str, object]:
        """What decides which keys and values a token gets. Reads all weights once."""
        return identity_of(self)

    def kv_bytes(self, num_tokens: int, num_rows: int = 0) -> int:
        """The most bytes that a sequence of `num_tokens` (prompt, answer and largest tree) takes in the KV cache.

        Recurrent layers add their states, and what they keep of the `num_rows` of a step.
        """
        return self.kv_shape.nbytes(num_tokens) + num_rows * self.kv_shape.state.kept_bytes

    def request_bytes(self, prompt_tokens: int, answer_tokens: int, tree_tokens: int, num_rows: int = 0) -> int:
        """`kv_bytes` of a request; layers with a state keep something of a step's rows, or of a piece of the prompt."""
        most_rows = max(num_rows, min(prompt_tokens, PREFILL_CHUNK))
        return self.kv_bytes(prompt_tokens + answer_tokens + tree_tokens, most_rows)

    def new_slot(self) -> Slot:
        """An empty slot."""
        return Slot(self._empty_cache(), one_path=self.one_path)

    def _empty_cache(self) -> KVCache:
        return KVCache(self.kv_shape, self.arena)

    @torch.inference_mode()
    def fork(self, slot: Slot, length: int, room: int = 0) -> Slot:
        """A new slot with a copy of the first `length` tokens and room for `room` tokens; `slot` is unchanged."""
        return Slot(slot.kv.fork(length, room), slot.token_ids[:length], one_path=slot.one_path)

    def slot_bytes(self, slot: Slot) -> int:
        """Bytes of a slot's keys, values and states."""
        return int(slot.kv.nbytes)

    def reserve(self, slot: Slot, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in the slot's KV cache."""
        slot.kv.reserve(num_tokens)

    def save(self, slot: Slot, num_tokens: int) -> list[Tensor]:
        """Copies of a slot's first keys and values, and of its states there."""
        rows: list[Tensor] = slot.kv.copied(num_tokens)
        return rows

    def saved_bytes(self, num_tokens: int) -> int:
        """Bytes of what `save` returns."""
        return self.kv_shape.row_bytes * num_tokens + self.kv_shape.state.nbytes

    @torch.inference_mode()
    def restore(self, token_ids: Sequence[int], saved: Sequence[Tensor], room: int = 0) -> Slot:
        """A new slot of these tokens, with their `saved` rows. Raises ValueError if these do not fit."""
        slot = self.new_slot()
        slot.kv.reserve(room)
        slot.kv.fill(saved, len(token_ids))
        slot.token_ids.extend(token_ids)
        return slot

    @torch.inference_mode()
    def continue_prefill(self, slot: Slot, prompt_ids: Sequence[int], max_tokens: int) -> bool:
        """Compute at most `max_tokens` more tokens of the prompt; True when only its last one is pending."""
        done, goal = len(slot.token_ids), len(prompt_ids) - 1
        slot.kv.reserve(len(prompt_ids))
        if done < goal:
            chunk = prompt_ids[done : min(done + max(max_tokens, 1), goal)]
            self._prefill_chunk(slot, chunk)
            done += len(chunk)
        if done == goal:
            slot.pending = prompt_ids[-1]
        return done == goal

    def _prefill_chunk(self, slot: Slot, token_ids: Sequence[int]) -> None:
        step = self.runner.most_rows or len(token_ids)
        for start in range(0, len(token_ids), step):
            piece = token_ids[start : start + step]
            self.runner.fill(chain_rows(slot.kv, piece))
            slot.kv.keep(range(len(piece)))
            slot.token_ids.extend(piece)
        slot.kv.mark()

    @torch.inference_mode()
    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """Logits after the pending token and after every node, `[num_nodes + 1, vocab_size]` for each sequence.

        All sequences go through the model together, as many as `most_rows` allows.
        """
        if any(slot.pending == NOTHING_PENDING for slot, _ in batch):
            raise ValueError("a sequence without a pending token cannot be scored: finish its prefill first")
        return self.runner.logits([tree_rows(slot.kv, slot.pending, tree) for slot, tree in batch])

    @torch.inference_mode()
    def commit_all(self, batch: Sequence[Commit]) -> list[Exception | None]:
        """Keep each sequence's pending token and accepted path; returns each sequence's error, or None."""
        errors: list[Exception | None] = []
        for slot, tree, path, next_token in batch:
            try:
                accepted = [tree.token_ids[node] for node in path]
                slot.kv.keep([0, *(node + 1 for node in path)])
                slot.token_ids += [slot.pending, *accepted]
                slot.pending = next_token
                errors.append(None)
            except Exception as error:
                errors.append(error)
        return errors

    def nearest(self, slot: Slot, length: int) -> int:
        """The most tokens, up to `length`, that the slot can go back to: fewer only with recurrent layers."""
        return int(slot.kv.nearest(length))

    def rewind(self, slot: Slot, length: int) -> int:
        """Forget all committed tokens from `length` on, and everything scored; returns how many remain."""
        nearest = self.nearest(slot, length)
        slot.kv.rewind(nearest)
        del slot.token_ids[nearest:]
        return nearest

    def discard(self, slot: Slot) -> None:
        """Forget everything scored but not committed; may be called at any time, also after a failed forward."""
        self.rewind(slot, min(slot.kv.length, len(slot.token_ids)))


def target_of(model: PreTrainedModel | Target, *, bitwise: bool = False, cuda_graphs: bool = False) -> Target:
    """Wrap a model by its kind, or return a target as it is.

    Raises ConfigError for a target made without these options, UnsupportedError for a model that cannot have them.
    """
    if isinstance(model, TargetModel):
        lacking = {"cuda_graphs": cuda_graphs and model.arena is None, "bitwise": bitwise and not model.bitwise}
        for option in (name for name, lacks in lacking.items() if lacks):
            raise ConfigError(f"this TargetModel was made without {option}=True: make it with that, or pass its model")
        return model
    if isinstance(model, Target):
        if bitwise and not model.capabilities.bitwise:
            raise ConfigError(
                f"{type(model).__name__} does not round a row the same way in every forward: leave bitwise out"
            )
        return model
    source, options = ModelSource(None, model.config, model), TargetOptions(bitwise=bitwise, cuda_graphs=cuda_graphs)
    package = support_for(source, options)
    if package is not None:
        return package.load(source, options)
    return TargetModel(model, bitwise=bitwise, cuda_graphs=cuda_graphs)


def check_one_process(model: PreTrainedModel) -> None:
    """Raise UnsupportedError for a model whose weights are spread over several processes."""
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):  # torch's DTensor
        raise UnsupportedError(
            f"the weights of this {type(model).__name__} are spread over several processes, and Precedent runs a model "
            "in one: load it without tp_plan or device_mesh, or serve it with vLLM and precedent-vllm"
        )
