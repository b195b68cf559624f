"""Modes that may change the output distribution, each requested by name; every verdict reports what it spent.

`lossy_mentored:kl=0.05`, `lossy_typical:epsilon=0.09,delta=0.3` and `lossy_top_beta:beta=3,tau=1` verify against a
distribution that a rule makes from the target's (`relaxed`, `rules`); `lossy_judge:name=...` lets a learned judge
overrule rejections (`judge`, `trained`); `pareto` says how far each is from the best rule. No lossless code imports
this package; a request that names one of these modes loads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from precedent.config import JUDGE_MODE
from precedent.errors import ConfigError
from precedent.verify import Verifier
from precedent.verify.lossy.judge import Judge, load_judge, overruled_by
from precedent.verify.lossy.relaxed import relaxed
from precedent.verify.lossy.rules import Mentored, TopBeta, Typical
from precedent.verify.lossy.trained import TrainedJudge

__all__ = ["RULES", "Judge", "TrainedJudge", "judge_of", "lossy_verifier", "overruled_by", "relaxed"]

AnyRule = Mentored | Typical | TopBeta

RULES: Mapping[str, type[AnyRule]] = {
    "lossy_mentored": Mentored,
    "lossy_typical": Typical,
    "lossy_top_beta": TopBeta,
}
"""Mode name to rule; the rule's fields are the mode's parameters."""


@lru_cache(maxsize=64)
def lossy_verifier(mode: str) -> Verifier:
    """The verifier of `mode`, such as `lossy_top_beta:beta=3,tau=1`; made once, so that a judge is not read every step.

    Raises ConfigError for an unknown mode or parameter, or a value out of range.
    """
    name, _, text = mode.partition(":")
    settings = _settings(mode, text)
    if name == JUDGE_MODE:
        return overruled_by(judge_of(mode))
    if name not in RULES:
        raise ConfigError(f"mode={mode!r} is not a lossy mode; use one of {', '.join((*RULES, JUDGE_MODE))}")
    return relaxed(_rule(mode, name, settings))


def _settings(mode: str, text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if any(not key.strip() or not value.strip() for key, _, value in pairs):
        raise ConfigError(f"mode={mode!r}: write parameters as name=value, separated by commas")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _rule(mode: str, name: str, settings: Mapping[str, str]) -> AnyRule:
    known = [field.name for field in dataclasses.fields(RULES[name])]
    values: dict[str, Any] = {}
    for key in settings:
        if key not in known:
            raise ConfigError(f"mode={mode!r}: {name} has no parameter {key!r}; known: {', '.join(known)}")
        values[key] = _number(mode, settings, key)
    return RULES[name](**values)


@lru_cache(maxsize=64)
def judge_of(mode: str) -> Judge:
    """The judge that a mode such as `lossy_judge:name=mine` names. Raises ConfigError as `lossy_verifier` does."""
    settings = _settings(mode, mode.partition(":")[2])
    if not {"name"} <= settings.keys() <= {"name", "threshold"}:
        raise ConfigError(f"mode={mode!r}: name an installed judge, as in {JUDGE_MODE}:name=my-judge")
    judge = load_judge(settings["name"])
    if "threshold" not in settings:
        return judge
    if not isinstance(judge, TrainedJudge):
        raise ConfigError(f"mode={mode!r}: only a judge of `precedent train-judge` has a threshold; leave it out")
    return judge.at(_number(mode, settings, "threshold"))


def _number(mode: str, settings: Mapping[str, str], key: str) -> float:
    try:
        return float(settings[key])
    except ValueError as error:
        raise ConfigError(f"mode={mode!r}: {key}={settings[key]} is not a number") from error
