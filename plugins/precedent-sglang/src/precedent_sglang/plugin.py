"""What SGLang runs in each of its processes before anything else: the entry point of `sglang.srt.plugins`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precedent.errors import UnsupportedError
from precedent_sglang.settings import Settings

WORKER = "sglang.srt.speculative.ngram_worker.NGRAMWorker"

READ = ("0.5.23",)
"""Versions whose source was read. None ran here."""


def check_version(version: str) -> None:
    """Raise UnsupportedError for a version whose interface is not known; a build's own suffix (`+cu130`) is ignored."""
    if version.partition("+")[0] not in READ:
        raise UnsupportedError(
            f"precedent-sglang knows SGLang {', '.join(READ)}, and this is {version or 'of no version'}: "
            "install that one, or a newer precedent-sglang"
        )


class SGLang:
    """All that is asked of SGLang itself."""

    def version(self) -> str:
        """The installed version."""
        from sglang.version import __version__

        return str(__version__)

    def around(self, target: str, hook: Callable[..., Any]) -> None:
        """Have `hook(original, *arguments)` called in place of a method."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(target, hook, HookType.AROUND)


def register(sglang: SGLang | None = None, settings: Settings | None = None) -> None:
    """Wrap the n-gram worker, which opens the store when it is made; SGLang calls this once per process.

    Raises UnsupportedError for an SGLang whose worker is not known, and ConfigError for settings that do not fit:
    SGLang logs that with the plug-in's name, and serves without it.
    """
    settings, sglang = settings or Settings.read(), sglang or SGLang()
    if not settings.on:
        return
    check_version(sglang.version())
    from precedent_sglang.hook import Hook

    hook = Hook(settings)
    sglang.around(f"{WORKER}.__init__", hook.start)
    sglang.around(f"{WORKER}._prepare_draft_tokens", hook.prepare)
