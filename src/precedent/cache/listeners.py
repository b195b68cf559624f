"""Methods to call when something happens, each while its object lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class Listeners:
    """Bound methods without arguments, held weakly, called in the order in which they were added."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, method: Callable[[], None]) -> None:
        """Call this bound method from now on."""
        self._methods = [reference for reference in self._methods if reference() is not None]
        self._methods.append(weakref.WeakMethod(method))

    def call(self) -> None:
        """Call all whose objects live."""
        for method in [method for reference in self._methods if (method := reference()) is not None]:
            method()
