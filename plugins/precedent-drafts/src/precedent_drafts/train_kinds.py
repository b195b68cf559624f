"""The kinds of drafts that `precedent train-draft` trains: which options each takes, its recipe and its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from precedent.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Kind(StrEnum):
    """What is trained."""

    CHAIN = "chain"
    BLOCK = "block"
    EXIT = "exit"


class Condition(StrEnum):
    """What a draft reads beside tokens: its target's states, or nothing."""

    TARGET = "target"
    NONE = "none"


CHAIN, CONDITIONED, BLOCK, EXIT = (
    "--kind chain", "--kind chain --condition target", "--kind block", "--kind exit",
)  # fmt: skip

TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "layers": (CHAIN, CONDITIONED, BLOCK),
    "start": (CHAIN, CONDITIONED, BLOCK),
    "rounds": (CHAIN,),
    "fusion": (CONDITIONED,),
    "passes": (CONDITIONED,),
    "mask_top_k": (CONDITIONED,),
    "block_size": (BLOCK,),
    "iterations": (BLOCK,),
    "context_tokens": (BLOCK, CONDITIONED),
    "exit_layer": (EXIT,),
    "exit_width": (EXIT,),
    "condition": (CHAIN, CONDITIONED, BLOCK),
}
"""Options that not every kind takes, and who takes them."""


OF_EVERY_KIND = ("head_tokens", "temperature", "answer_tokens", "seed")
"""Options that every recipe takes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A kind, what it reads, and the values of all options by their names."""

    kind: Kind
    condition: Condition | None
    options: Mapping[str, Any]

    @property
    def way(self) -> str:
        """The options that say what is trained."""
        if self.kind is Kind.CHAIN:
            return CONDITIONED if self.condition is Condition.TARGET else CHAIN
        return BLOCK if self.kind is Kind.BLOCK else EXIT

    def check(self, context: typer.Context) -> None:
        """Raise ConfigError for an option on the command line that this kind does not take."""
        for name, takers in TAKEN_BY.items():
            source = context.get_parameter_source(name)
            if self.way not in takers and source is not None and source.name == "COMMANDLINE":
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} is for {' or '.join(takers)}, and this is {self.way}: leave it out")

    def recipe_and_training(self) -> tuple[Any, Callable[..., Any]]:
        """The recipe, and the class of the training. Raises ConfigError for a value out of range."""
        makers = {CHAIN: self._chain, CONDITIONED: self._conditioned, BLOCK: self._block, EXIT: self._exit}
        return makers[self.way]()

    def compared_with(self, model: PreTrainedModel) -> dict[str, PreTrainedModel]:
        """Drafts that the report shows beside the trained one, by name: the layers that an exit stands behind."""
        from precedent.target.load.first_layers import FIRST_LAYERS, first_layers

        layer = self.options["exit_layer"]
        return {f"{FIRST_LAYERS}{layer}": first_layers(model, layer)} if self.kind is Kind.EXIT else {}

    def _chain(self) -> tuple[Any, Callable[..., Any]]:
        from precedent_drafts.training.distil import Distillation
        from precedent_drafts.training.schedule import Recipe

        given = self._given("start", "rounds", *OF_EVERY_KIND)
        return Recipe(**self._named(num_layers="layers"), **given), Distillation

    def _conditioned(self) -> tuple[Any, Callable[..., Any]]:
        from precedent_drafts.training.conditioned_training import ConditionedRecipe, ConditionedTraining

        given = self._given("start", "fusion", "passes", "mask_top_k", "context_tokens", *OF_EVERY_KIND)
        return ConditionedRecipe(**self._named(num_layers="layers"), **given), ConditionedTraining

    def _block(self) -> tuple[Any, Callable[..., Any]]:
        from precedent_drafts.training.block_recipe import BlockRecipe
        from precedent_drafts.training.block_training import BlockTraining

        given = self._given("start", "block_size", "context_tokens", "iterations", *OF_EVERY_KIND)
        given |= {"filled": 0.0 if self.options["iterations"] == 1 else 0.5, "condition": self.condition or "target"}
        return BlockRecipe(**self._named(num_layers="layers"), **given), BlockTraining

    def _exit(self) -> tuple[Any, Callable[..., Any]]:
        from precedent_drafts.training.exit_training import ExitRecipe, ExitTraining

        named = self._named(layer="exit_layer", width="exit_width")
        return ExitRecipe(**named, **self._given(*OF_EVERY_KIND)), ExitTraining

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: self.options[name] for name in names}

    def _named(self, **names: str) -> dict[str, Any]:
        """Options under the names that a recipe has for them."""
        return {name: self.options[option] for name, option in names.items()}
