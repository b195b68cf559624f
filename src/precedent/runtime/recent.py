"""A mapping of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Self, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Recent(OrderedDict[_Key, _Value]):
    """A mapping that keeps the `most` last set entries. Pickling drops them all: runs stay in their process."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.most:
            self.popitem(last=False)

    def get_or_make(self, key: _Key, make: Callable[[], _Value]) -> _Value:
        """Return the value of a key, which becomes the newest entry; `make` computes what is missing."""
        self[key] = value = self[key] if key in self else make()
        return value

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        return type(self), (self.most,)
