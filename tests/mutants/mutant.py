"""A mutant: the library with one named attribute replaced by something that does a little less, or another thing."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Change = Callable[[Any], Any]
"""From an attribute to what stands in its place."""


class MutantGone(Exception):
    """The attribute that a mutant replaces is not there any more."""


@dataclass(frozen=True)
class Mutant:
    """`change` of the attribute `target` ("module:name" or "module:Class.name")."""

    target: str
    change: Change

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The library with this mutant in it. Raises MutantGone."""
        owner, name, original = self._found()
        changed = self.change(original)
        places = [owner] if inspect.isclass(owner) else _modules_with(name, original)
        before = [(place, inspect.getattr_static(place, name)) for place in places]
        for place, old in before:
            setattr(place, name, classmethod(changed) if isinstance(old, classmethod) else changed)
        try:
            yield
        finally:
            for place, old in before:
                setattr(place, name, old)

    def _found(self) -> tuple[Any, str, Any]:
        """Who has the attribute, its name, and what it is."""
        _import_langchain_side()
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        try:
            owner: Any = import_module(module)
            for part in owners:
                owner = getattr(owner, part)
            found = inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            raise MutantGone(
                f"{self.target} is not there any more ({error}): move the mutants that change it"
            ) from None
        return owner, name, found.__func__ if isinstance(found, classmethod) else found


def _import_langchain_side() -> None:
    """All modules that may hold an attribute under its name, so that it is replaced in each of them."""
    package = import_module("precedent.langchain")
    for module in pkgutil.iter_modules(package.__path__, "precedent.langchain."):
        import_module(module.name)


def _modules_with(name: str, value: Any) -> list[Any]:
    modules = [module for key, module in list(sys.modules.items()) if key.split(".")[0] == "precedent"]
    return [module for module in modules if vars(module).get(name) is value]
