"""Checks of a request before any work starts: whether it may run, and how it is verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from precedent.config import MODES, PromptScores, SamplingParams, SpeculationConfig
from precedent.errors import ConfigError, ContextOverflowError, PromptError, UnsupportedError
from precedent.grammar import Grammar
from precedent.runtime.plain_values import checked_ids, is_whole, shown
from precedent.verify import verifier_of

if TYPE_CHECKING:
    from precedent.target import Target

SWITCH = "PRECEDENT_SPECULATION"
"""Environment variable that turns speculation off in a running process: `off`, or `on` (the default)."""

MOST_KEY_CHARACTERS = 1000
"""Characters of a request's soft keys, `workflow_step` and `tools`."""

MOST_QUERY_CHARACTERS = 16_384
"""Characters of a query that are embedded and stored; embedders read the first few thousand at most."""

ARGUMENTS: dict[str, tuple[Any, str]] = {
    "sampling": (SamplingParams, "a SamplingParams"),
    "speculation": (SpeculationConfig | None, "a SpeculationConfig"),
    "scores": (PromptScores | None, "a PromptScores"),
    "grammar": (Grammar | None, "a Grammar"),
    "write_back": (Callable | None, "a function of a completion"),
    "shown_tokens": (Collection | None, "a collection of token ids"),
}
"""Arguments of `Engine.submit` that are not texts: their types, and what these are called."""


def unless_switched_off(speculation: SpeculationConfig) -> SpeculationConfig:
    """The given settings, or plain decoding that stores nothing if `SWITCH` is off.

    Raises ConfigError for another value of `SWITCH`.
    """
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise ConfigError(f"{SWITCH}={switch!r} is neither 'on' nor 'off'")
    return speculation if switch == "on" else replace(speculation, enabled=False, write_back=False)


def check_arguments(**arguments: object) -> None:
    """Raise ConfigError for an argument of `Engine.submit` of another type than it should have, or too long a key."""
    for name, value in arguments.items():
        kind, expected = ARGUMENTS.get(name, (str, "a text"))
        if not isinstance(value, kind) or (kind is not str and isinstance(value, str | bytes)):
            raise ConfigError(f"{name}={shown(value)} must be {expected}")
        if name in ("workflow_step", "tools") and len(value) > MOST_KEY_CHARACTERS:
            raise ConfigError(
                f"{name} has {len(value):,} characters, at most {MOST_KEY_CHARACTERS:,} are allowed: give a short name"
            )


def checked_prompt(prompt_ids: Sequence[int], target: Target) -> tuple[int, ...]:
    """The prompt's token ids, which are not read if there are too many of them.

    Raises PromptError for anything but token ids, an empty prompt or an unknown token, ContextOverflowError if no
    answer would fit.
    """
    expected = "a list of token ids: encode a text with the engine's tokenizer"
    if not hasattr(prompt_ids, "__len__"):
        raise PromptError(f"prompt_ids={shown(prompt_ids)} must be {expected}")
    length, last = len(prompt_ids), target.vocab_size - 1
    if not length:
        raise PromptError("the prompt is empty: give at least one token")
    if length > target.context_length or target.most_answer_tokens(length) < 1:
        raise ContextOverflowError(  # LangChain's clients know the error by its first words
            f"the prompt is too long: {length} tokens, the model's context holds {target.context_length}: "
            "shorten the conversation or the tool results"
        )
    prompt = checked_ids("prompt_ids", prompt_ids, expected, error=PromptError)
    if min(prompt) < 0 or max(prompt) > last:
        unknown = next(token for token in prompt if not 0 <= token <= last)
        raise PromptError(
            f"the prompt holds token id {unknown}, the model knows 0 to {last}: use the model's own tokenizer"
        )
    return prompt


def check_answer_length(max_tokens: int, target: Target) -> None:
    """Raise ConfigError for an answer that is longer than any that the model's context holds.

    Whoever leaves the default asks for nothing, and a prompt that leaves less room shortens the answer.
    """
    longest = target.most_answer_tokens(0)
    if max_tokens > longest and max_tokens != SamplingParams().max_tokens:
        raise ConfigError(
            f"max_tokens={shown(max_tokens)} is more than the model's context can hold: give at most {longest}; an "
            "answer that reaches the context's end stops there, with the finish reason 'length'"
        )


def check_prefix(prefix_tokens: int, prompt: Sequence[int], *, kept: bool) -> None:
    """Raise ConfigError for a prefix that is longer than its prompt, or that the engine does not keep."""
    if not is_whole(prefix_tokens) or not 0 <= prefix_tokens <= len(prompt):
        raise ConfigError(f"prefix_tokens={shown(prefix_tokens)} must be a number of the prompt's {len(prompt)} tokens")
    if prefix_tokens and not kept:
        raise ConfigError(
            f"prefix_tokens={prefix_tokens} is for an engine that keeps prefixes: load it with keep_prefixes=True"
        )


def check_scores(target: Target) -> None:
    """Raise UnsupportedError where an encoder reads the prompt."""
    if target.encodes_prompt:
        raise UnsupportedError(
            "scores are not available: an encoder reads this model's prompts and predicts none of it"
        )


def check_token_ids(sampling: SamplingParams, num_tokens: int) -> None:
    """Raise ConfigError if a bias or a stop token is outside the tokenizer's `num_tokens` token ids."""
    for name, token_ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if token_ids and max(token_ids) >= num_tokens:
            raise ConfigError(
                f"{name} names token id {max(token_ids)}, the tokenizer knows 0 to {num_tokens - 1}: "
                "use the ids of the model's own tokenizer"
            )


def mode_of(speculation: SpeculationConfig, sampling: SamplingParams) -> str:
    """The verification mode of a request. Raises ConfigError if the requested mode would ignore a setting."""
    mode, seeded = speculation.mode, sampling.seed is not None
    if mode not in MODES:
        verifier_of(mode)  # refuse a wrong parameter now, not in the middle of an answer
        return mode
    if mode == "auto" or sampling.greedy:
        return "greedy" if sampling.greedy else "coupled" if seeded else "traversal"
    if mode == "greedy":
        raise ConfigError(f"mode='greedy' would ignore temperature={sampling.temperature}: set temperature=0")
    if seeded and mode != "coupled":
        # random numbers derived from the seed would not be independent of a completion cached under the same seed
        raise ConfigError(
            f"mode={mode!r} draws fresh random numbers for every request: drop the seed, or use mode='coupled'"
        )
    if mode == "coupled" and not seeded:
        raise ConfigError("mode='coupled' needs a seed: give SamplingParams(seed=...)")
    return mode


def checked_mode(speculation: SpeculationConfig, sampling: SamplingParams, target: Target) -> str:
    """`mode_of` a request to this target.

    Raises ConfigError too if the mode needs what the target lacks, or if a `bitwise` target could not keep its promise.
    """
    mode = mode_of(speculation, sampling)
    verifier, most_rows = verifier_of(mode), target.capabilities.most_rows
    if most_rows is not None and verifier.lossy:
        raise ConfigError(f"mode={mode!r} changes answers on purpose, and this engine was made with bitwise=True")
    if most_rows is not None and speculation.enabled and speculation.max_nodes + speculation.max_draws >= most_rows:
        raise ConfigError(
            f"max_nodes={speculation.max_nodes} and max_draws={speculation.max_draws} may make a tree of more than "
            f"{most_rows - 1} nodes, the most that bitwise=True allows: choose both so that their sum is at most "
            f"{most_rows - 1}"
        )
    verifier.check_target(target)
    if verifier.reads_hidden_states and not target.keeps_hidden_states:
        raise ConfigError(
            f"mode={mode!r} reads the target's hidden states, which are kept from the engine's start: name the mode in "
            "the engine's own speculation=SpeculationConfig(mode=…)"
        )
    return mode


def prepare_target(target: Target, mode: str) -> None:
    """Let the target keep hidden states if the engine's default mode reads them.

    Raises ConfigError for a mode that does not suit the target, and what `keep_hidden_states` raises.
    """
    if mode not in MODES:
        verifier = verifier_of(mode)
        verifier.check_target(target)
        if verifier.reads_hidden_states:
            target.keep_hidden_states()
