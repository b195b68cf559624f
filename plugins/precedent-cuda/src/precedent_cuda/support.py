"""What Precedent's torch target asks for on a GPU: forwards of fixed size, for `cuda_graphs` and for `bitwise`.

The other modules are imported where they are needed: most processes have this package and no GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from precedent.errors import UnsupportedError
from precedent.target.bitwise import MOST_ROWS, refusal
from precedent.target.support import Backend, ModelSupport, TargetOptions
from precedent_cuda import StaticSettings

if TYPE_CHECKING:
    from precedent.target.kv.shape import KVShape
    from precedent.target.runner import Runner
    from precedent.verify import Pending


class CudaSupport(ModelSupport):
    """Forwards of fixed size: where `cuda_graphs` asks for them, and for `bitwise` on a GPU."""

    def bitwise(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Collection[int] | None:
        """The lengths at which a piece of keys, and a bucket of keys, overflows; `backend` does the rest."""
        if not _wanted(runner, options):
            return None
        from precedent_cuda.attention import PIECE
        from precedent_cuda.static_forward import LEAST_KEYS

        return (PIECE + 1, LEAST_KEYS + 1)

    def backend(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Backend | None:
        """Forwards of a few sizes as CUDA graphs; with `bitwise`, all of them have `MOST_ROWS` rows."""
        if not _wanted(runner, options):
            return None
        from precedent_cuda.static_runner import Hindrance, fixed_sizes

        settings = options.cuda_graphs if isinstance(options.cuda_graphs, StaticSettings) else StaticSettings()
        try:
            return fixed_sizes(runner, kv_shape, settings, MOST_ROWS if options.bitwise else None)
        except Hindrance as hindrance:
            if options.bitwise:
                raise refusal(runner.model, str(hindrance)) from hindrance
            name = runner.model.config.get_text_config().model_type
            raise UnsupportedError(
                f"{name} cannot run as CUDA graphs: {hindrance}; leave cuda_graphs out"
            ) from hindrance

    def verify_ahead(self, pending: Sequence[Pending]) -> None:
        """Find the verdicts of all trees on a GPU with a single wait for it."""
        if any(on_gpu(each) for each in pending):
            from precedent_cuda.ahead import verify_ahead

            verify_ahead([each for each in pending if on_gpu(each)])


def on_gpu(pending: Pending) -> bool:
    """Whether reading a number of the rows means waiting for a GPU."""
    return pending.rows.raw.is_cuda


def _wanted(runner: Runner, options: TargetOptions) -> bool:
    return bool(options.cuda_graphs) or (options.bitwise and runner.device.type == "cuda")


SUPPORT = CudaSupport()
