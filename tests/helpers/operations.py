"""Which of torch's operations run inside a block: on a GPU each is launched, however little it does."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes every operation inside: all `names`, and the `launched`, which compute or copy something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.names: list[str] = []
        self.launched: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names.append(name)
        if not func.is_view and "empty" not in name:
            self.launched.append(name)
        return func(*args, **(kwargs or {}))
