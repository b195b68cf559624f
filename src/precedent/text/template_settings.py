"""Settings that a caller passes to a chat template besides messages and tools: variables and a switch for thinking."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import meta

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.runtime.plain_values import check_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SWITCHES = ("enable_thinking", "thinking")
"""Variables that switch thinking on or off: the first in templates of Qwen and others, then DeepSeek and Granite."""

EFFORT = "reasoning_effort"
"""The variable that tells gpt-oss's template how much to think."""

_OF_THE_RENDERER = frozenset({"messages", "raise_exception", "strftime_now"})
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """`variables` for a chat template, and `reasoning`: True, False, an effort such as "low", or None.

    Raises ConfigError for values of any other type.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: bool | str | None = None

    def __post_init__(self) -> None:
        named = isinstance(self.variables, Mapping) and all(isinstance(name, str) for name in self.variables)
        if not named:
            raise ConfigError(f"chat_template_kwargs={self.variables!r} must map names of the template to values")
        if not (self.reasoning is None or isinstance(self.reasoning, bool | str)):
            raise ConfigError(f"reasoning={self.reasoning!r} must be True, False, or an effort such as 'low'")
        check_plain("chat_template_kwargs", self.variables)
        check_plain("reasoning", self.reasoning)

    def of_template(self, tokenizer: PreTrainedTokenizerBase, template: str) -> dict[str, Any]:
        """The variables to pass to `template`.

        Raises ConfigError for a name that is reserved or that the template does not read, UnsupportedError for
        `reasoning` if the template has no switch for it.
        """
        readable = sorted(template_variables(template) - _reserved(tokenizer))
        for name in self.variables:
            if name in _reserved(tokenizer):
                raise ConfigError(f"chat_template_kwargs cannot replace {name!r}, which comes from the conversation")
            if name not in readable:
                known = ", ".join(readable) or "no variable of a caller"
                raise ConfigError(f"the model's chat template does not read {name!r}; it reads {known}")
        switched = {} if self.reasoning is None else {_switch(self.reasoning, readable): self.reasoning}
        if twice := switched.keys() & self.variables.keys():
            raise ConfigError(f"reasoning= and chat_template_kwargs both set {min(twice)!r}: give one of them")
        return {**self.variables, **switched}


def variables_of(
    settings: Iterable[TemplateSettings], tokenizer: PreTrainedTokenizerBase, template: str
) -> dict[str, Any]:
    """The variables that all settings give a template; later settings override earlier ones."""
    variables: dict[str, Any] = {}
    for one in settings:
        variables |= one.of_template(tokenizer, template)
    return variables


@lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """Names that a template reads before it sets them. Raises PromptError if the template is not valid Jinja."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION_TAG.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(f"the model's chat template cannot be read: {error}") from error
    first_uses: dict[str, str] = {}
    for name, use in _uses(parsed):
        first_uses.setdefault(name, use)
    return frozenset(name for name in meta.find_undeclared_variables(parsed) if first_uses[name] == "load")


def _uses(node: jinja2.nodes.Node) -> Iterator[tuple[str, str]]:
    """Names below a node in order of evaluation, and whether each is read ("load") or set."""
    if isinstance(node, jinja2.nodes.Name):
        yield node.name, node.ctx
    children = list(node.iter_child_nodes())
    for child in reversed(children) if isinstance(node, jinja2.nodes.Assign) else children:
        yield from _uses(child)


def _reserved(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return _OF_THE_RENDERER | parameters.keys() | tokenizer.special_tokens_map.keys()


def _switch(reasoning: bool | str, readable: list[str]) -> str:
    wanted = SWITCHES if isinstance(reasoning, bool) else (EFFORT,)
    found = next((name for name in wanted if name in readable), None)
    if found is not None:
        return found
    if isinstance(reasoning, bool) and EFFORT in readable:
        raise UnsupportedError(f"reasoning={reasoning} cannot be set for this model: write reasoning='low' or 'high'")
    if not isinstance(reasoning, bool) and any(name in readable for name in SWITCHES):
        raise UnsupportedError(f"reasoning={reasoning!r} cannot be set for this model: write reasoning=True or False")
    raise UnsupportedError(
        f"reasoning={reasoning!r}: this model's chat template has no switch for thinking "
        f"({', '.join((*SWITCHES, EFFORT))}): leave it out"
    )
