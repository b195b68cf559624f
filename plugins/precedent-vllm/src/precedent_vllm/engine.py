"""All that is asked of vLLM itself. Everything else here works on plain arrays, objects and HTTP messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from precedent.errors import UnsupportedError
from precedent_vllm import rejection

Call = Callable[[Any], None]

RUN = ("0.32", "0.33")
"""Versions whose contract of `custom_class` is known; 0.32 is the one that the tests run."""

READ = ("0.29",)
"""Versions whose source was read and found to have the same contract; nothing ran there."""

MENDED = RUN
"""Versions whose rejection sampler can be mended on a CPU."""


class Vllm:
    """The installed vLLM, as a drafter in one of its workers needs it."""

    def version(self) -> str:
        """The installed version."""
        import vllm

        return str(vllm.__version__)

    def check_version(self) -> None:
        """Raise UnsupportedError for a version whose contract is not known."""
        if _series(self.version()) not in (*RUN, *READ):
            raise UnsupportedError(
                f"precedent-vllm knows vLLM {', '.join((*READ, *RUN))}, and this is {self.version()}: "
                "install one of those, or a newer precedent-vllm"
            )

    def counts(self, vllm_config: Any) -> bool:
        """True in the worker whose drafts vLLM takes: the first of the tensor-parallel group in the last stage.

        vLLM makes drafters in the last pipeline stage only.
        """
        parallel = vllm_config.parallel_config
        width = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
        return bool(parallel.rank % width == 0)

    def hand_over_runner(self, drafter: Any) -> None:
        """Have vLLM's runner make itself and its requests known to its drafter; may be called again.

        `propose` is not told which request a row is; the runner's `input_batch` and `requests` say it.
        """
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        announce(GPUModelRunner, type(drafter))

    def check_rejection_sampler(self) -> None:
        """See that rejection sampling gives each row its request's settings on this machine; mend what is known.

        Raises UnsupportedError for a version that is wrong there and that cannot be mended.
        """
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from vllm.v1.sample import rejection_sampler

            rejection.check(rejection_sampler, mendable=_series(self.version()) in MENDED, version=self.version())


def announce(runner_class: Any, drafter_class: type) -> None:
    """Wrap two methods of a runner, for drafters of ours.

    `propose_draft_token_ids` first sets its drafter's `runner`. `_update_states`, with which each step begins, then
    calls its `arrived`, so that a request's search runs while vLLM computes the prompt; without that method it begins
    with the request's first drafts.
    """
    if not hasattr(runner_class, "propose_draft_token_ids"):
        raise UnsupportedError(f"{runner_class.__name__} has no propose_draft_token_ids: this vLLM is not known")

    def hand_over(runner: Any) -> None:
        runner.drafter.runner = runner

    def tell(runner: Any) -> None:
        runner.drafter.arrived(runner.requests)

    _wrap(runner_class, "propose_draft_token_ids", drafter_class, before=hand_over)
    if hasattr(runner_class, "_update_states"):
        _wrap(runner_class, "_update_states", drafter_class, after=tell)


def _wrap(
    runner_class: Any, name: str, drafter_class: type, before: Call | None = None, after: Call | None = None
) -> None:
    """Call something before or after a method of runners whose drafter is ours; a method is wrapped once."""
    inner = getattr(runner_class, name)
    if hasattr(inner, "of_precedent"):
        return

    @wraps(inner)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        ours = isinstance(getattr(self, "drafter", None), drafter_class)
        if ours and before:
            before(self)
        found = inner(self, *arguments, **named)
        if ours and after:
            after(self)
        return found

    wrapped.of_precedent = True  # type: ignore[attr-defined]
    setattr(runner_class, name, wrapped)


def _series(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
