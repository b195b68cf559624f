"""The frozen settings objects; an unknown key raises an error that lists the known ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from precedent.errors import ConfigError
from precedent.runtime.plain_values import check_plain, is_number, is_whole, shown
from precedent.runtime.plugins import installed, load_plugin

MODES = ("auto", "greedy", "coupled", "traversal", "topdown")
"""Every lossless verification mode; `auto` picks one of the others from the sampling settings."""

MODE_GROUP = "precedent.modes"
"""Entry-point group of further modes, which may change the output distribution; parameters follow the name:
`lossy_mentored:kl=0.05`."""


def mode_factory(mode: str) -> Callable[[Mapping[str, str]], Any]:
    """Return the function that makes the verifier of an installed mode. Raises ConfigError if there is none."""
    factory: Callable[[Mapping[str, str]], Any] | None = load_plugin(MODE_GROUP, mode.partition(":")[0])
    if factory is None:
        raise _unknown_mode(mode)
    return factory


def check_mode(mode: object) -> None:
    """Raise ConfigError unless `mode` is one of `MODES` or an installed one."""
    if not isinstance(mode, str) or (mode not in MODES and mode.partition(":")[0] not in installed(MODE_GROUP)):
        raise _unknown_mode(mode)


def _unknown_mode(mode: object) -> ConfigError:
    known = installed(MODE_GROUP)
    more = "" if known else "; more modes are installed by: pip install 'precedent-llm[research]'"
    return ConfigError(f"mode={shown(mode)} cannot verify; use one of {', '.join((*MODES, *known))}{more}")


def check_fields(settings: object, checks: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ConfigError for the first of (name, holds, rule) that does not hold; the message shows the value.

    State what must hold, not what must not: NaN fails every comparison.
    """
    for name, holds, rule in checks:
        if not holds:
            raise ConfigError(f"{name}={shown(getattr(settings, name))} {rule}")


class _FromDict:
    """Adds `from_dict`, which refuses unknown keys by name."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build the settings from a mapping. Raises ConfigError on an unknown key."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # mixin of dataclasses only
        for key in values:
            if key not in known:
                raise ConfigError(f"{cls.__name__} has no setting {key!r}; known: {', '.join(known)}")
        return cls(**values)


Range = tuple[Callable[[Any], bool], str]
"""A check that a value must pass, and the rule in words."""

_PENALTY: Range = (lambda value: -2 <= value <= 2, "must be a number between -2 and 2, 0 is off")

_NUMBERS: dict[str, Range] = {
    "temperature": (lambda value: value >= 0, "must be 0 (greedy) or a greater number"),
    "top_p": (lambda value: 0 < value <= 1, "must be a number in (0, 1]"),
    "min_p": (lambda value: 0 <= value < 1, "must be a number in [0, 1)"),
    "repetition_penalty": (lambda value: value > 0, "must be a number greater than 0"),
    "frequency_penalty": _PENALTY,
    "presence_penalty": _PENALTY,
}
_WHOLE_NUMBERS: dict[str, Range] = {
    "top_k": (lambda value: value >= 0, "must be 0 (off) or a number of tokens"),
    "max_tokens": (lambda value: value >= 1, "must be a number of tokens, at least 1"),
    "seed": (lambda value: True, "must be None or a whole number"),
    "logprobs": (lambda value: 0 <= value <= 20, "must be None or a whole number between 0 and 20"),
}
_MAY_BE_NONE = ("seed", "logprobs")

MOST_BIAS = 100
"""Largest absolute bias on a token's logit, as in OpenAI's API."""

MOST_STOPS = 64
"""Stop strings of a request; each step searches for all of them."""

MOST_STOP_CHARACTERS = 1000
"""Characters of one stop string."""

MOST_STOP_TOKENS = 1024
"""Stop tokens of a request; each step compares candidates with all of them."""


@dataclass(frozen=True, slots=True)
class SamplingParams(_FromDict):
    """How the next token is chosen from the target model's logits, and where an answer ends.

    - `temperature`: 0 is greedy decoding (argmax, lowest id on ties).
    - `top_k`: sample from this many of the likeliest tokens; 0 is off.
    - `top_p`: sample from the likeliest tokens of this total probability; 1 is off. Of equally likely tokens at the
      edge, as many stay as in transformers and vLLM, always those with the highest ids.
    - `min_p`: leave out tokens below this fraction of the highest probability; 0 is off.
    - `repetition_penalty`: above 1, tokens that occurred before become less likely, as in transformers; 1 is off.
    - `seed`: fixes the text (mode `coupled`); None draws fresh entropy for every request.
    - `max_tokens`: the most tokens of an answer.
    - `stop`: a text or several, before which an answer ends: at most 64, each of at most 1,000 characters.
    - `logprobs`: n returns the log-probability of every token and of the n likeliest at its place; None returns none.
    - `frequency_penalty`: OpenAI's; lowers the logit of a token by this for each time it occurred in the answer.
    - `presence_penalty`: OpenAI's; lowers the logit of a token that occurred in the answer by this, once.
    - `logit_bias`: token ids, and numbers that are added to their logits.
    - `stop_token_ids`: tokens with which an answer ends, at most 1,024.

    Raises ConfigError for a value of the wrong type or out of its range.

    >>> SamplingParams(temperature=0.7, stop="END").stop
    ('END',)
    >>> SamplingParams().greedy
    True
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 512
    stop: str | tuple[str, ...] = ()
    logprobs: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, limits in _NUMBERS.items():
            self._set(name, float(_checked(self, name, is_number, limits)))
        for name, limits in _WHOLE_NUMBERS.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                self._set(name, int(_checked(self, name, is_whole, limits)))
        self._set("stop", stop_texts(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True when the next token is the argmax."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Asks for the log-probabilities of a prompt's own tokens, each with the `num_top` likeliest at its place.

    `alone`: the request has no answer. Raises ConfigError for a `num_top` that is none, or above 20.
    """

    num_top: int = 0
    alone: bool = False

    def __post_init__(self) -> None:
        SamplingParams(logprobs=self.num_top)


def _checked(settings: object, name: str, is_kind: Callable[[object], bool], limits: Range) -> Any:
    value, (holds, rule) = getattr(settings, name), limits
    if not (is_kind(value) and holds(value)):
        raise ConfigError(f"{name}={shown(value)} {rule}")
    return value


def stop_texts(stop: Any) -> tuple[str, ...]:
    """Stop strings in order, without duplicates, from a string, list or None. Raises ConfigError for anything else."""
    texts = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop={shown(stop)} must be a text or a list of texts, at which the answer should end")
    if not all(texts):
        raise ConfigError("stop holds an empty string; give the texts at which the answer should end")
    texts = tuple(dict.fromkeys(texts))
    if len(texts) > MOST_STOPS:
        raise ConfigError(f"stop has {len(texts):,} texts: at most {MOST_STOPS} are allowed")
    if (longest := max(map(len, texts), default=0)) > MOST_STOP_CHARACTERS:
        raise ConfigError(f"stop has a text of {longest:,} characters: at most {MOST_STOP_CHARACTERS:,} are allowed")
    check_plain("stop", texts)
    return texts


def _token_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple | set | frozenset) or not all(is_whole(token) and token >= 0 for token in ids):
        raise ConfigError(f"stop_token_ids={shown(ids)} must be a list of token ids")
    found = tuple(sorted({int(token) for token in ids}))
    if len(found) > MOST_STOP_TOKENS:
        raise ConfigError(f"stop_token_ids has {len(found):,} tokens: at most {MOST_STOP_TOKENS:,} are allowed")
    return found


def _biases(bias: Any) -> dict[int, float]:
    """Token ids to logit biases; ids may be strings, as in JSON."""
    if not isinstance(bias, Mapping):
        raise ConfigError(f"logit_bias={shown(bias)} must map token ids to numbers")
    found = {}
    for token, value in bias.items():
        token_id = int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token
        if not (is_whole(token_id) and token_id >= 0 and is_number(value) and abs(value) <= MOST_BIAS):
            limits = f"between -{MOST_BIAS} and {MOST_BIAS}"
            raise ConfigError(f"logit_bias={{{shown(token)}: {shown(value)}}} must map token ids to numbers {limits}")
        found[int(token_id)] = float(value)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class SpeculationConfig(_FromDict):
    """What may be proposed and how it is verified.

    - `enabled`: False is plain decoding, through the same loop.
    - `drafters`: which drafters propose, in order of credit; `()` is none. `draft-model` is the draft that the engine
      was given, of any kind. Drafters that read what the target computes take part where the engine's settings name
      them.
    - `max_nodes`: the most nodes of a step's candidate tree.
    - `max_draws`: the most tokens that a draft model samples for it.
    - `mode`: one of `MODES`, or the mode of an installed package. `auto` is greedy at temperature 0, otherwise coupled
      with a seed and traversal without.
    - `write_back`: False stores nothing.

    Raises ConfigError for a value of the wrong type or out of its range.

    >>> SpeculationConfig.from_dict({"max_nodes": -1})
    Traceback (most recent call last):
    precedent.errors.ConfigError: max_nodes=-1 must lie between 0 and 256 nodes per step
    """

    enabled: bool = True
    drafters: tuple[str, ...] = ("recall", "prompt", "prediction", "template", "grammar", "draft-model")
    max_nodes: int = 32
    max_draws: int = 6
    mode: str = "auto"
    write_back: bool = True

    def __post_init__(self) -> None:
        check_mode(self.mode)
        for name in ("enabled", "write_back"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={shown(getattr(self, name))} must be True or False")
        nodes: Range = (lambda value: 0 <= value <= 256, "must lie between 0 and 256 nodes per step")
        draws: Range = (lambda value: 0 <= value <= 64, "must lie between 0 and 64 draws per step")
        object.__setattr__(self, "max_nodes", int(_checked(self, "max_nodes", is_whole, nodes)))
        object.__setattr__(self, "max_draws", int(_checked(self, "max_draws", is_whole, draws)))
        object.__setattr__(self, "drafters", drafter_names(self.drafters))


def drafter_names(drafters: Any) -> tuple[str, ...]:
    """A list of drafter names as a tuple. Raises ConfigError for anything else."""
    if isinstance(drafters, str):  # also a sequence, of names of one letter
        raise ConfigError(f"drafters={shown(drafters)} must be a list of names: [{drafters!r}]")
    if not isinstance(drafters, list | tuple) or not all(isinstance(name, str) for name in drafters):
        raise ConfigError(f"drafters={shown(drafters)} must be a list of names")
    return tuple(drafters)


@dataclass(frozen=True, slots=True)
class EngineLimits(_FromDict):
    """How much one engine does and holds at once; requests that do not fit wait, first come, first served.

    - `max_running`: requests prefilled or decoded at once.
    - `max_kv_bytes`: bytes of keys and values, for running requests (each with room for its whole answer and its
      largest tree) and for idle conversations, which are evicted first. None is half of the memory that is free when
      the engine starts (on an accelerator four fifths; with `bitwise` there, the arena of docs/how-to/gpu.md).
    - `max_idle_kv_bytes`: how many of these bytes idle conversations may take.
    - `prefill_tokens_per_round`: prompt tokens computed between two steps of the running requests. Fewer keep their
      streams even; more bring a new request's first token sooner.

    Raises ConfigError for a value out of its range.

    >>> EngineLimits(max_running=8).max_running
    8
    """

    max_running: int = 32
    max_kv_bytes: int | None = None
    max_idle_kv_bytes: int = 512 * 2**20
    prefill_tokens_per_round: int = 128

    def __post_init__(self) -> None:
        least = {"max_running": 1, "max_kv_bytes": 1, "max_idle_kv_bytes": 0, "prefill_tokens_per_round": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if name == "max_kv_bytes" and value is None:
                continue
            if not is_whole(value) or value < bound:
                raise ConfigError(f"{name}={shown(value)} must be a whole number, at least {bound}")
