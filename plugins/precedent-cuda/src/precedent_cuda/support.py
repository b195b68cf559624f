"""What Precedent's torch target asks for on a GPU: forwards of fixed size, for `cuda_graphs` and for `bitwise`."""

from __future__ import annotations

from collections.abc import Collection

from precedent.errors import UnsupportedError
from precedent.target.bitwise import MOST_ROWS, refusal
from precedent.target.kv.shape import KVShape
from precedent.target.runner import Runner
from precedent.target.support import Backend, ModelSupport, TargetOptions
from precedent_cuda.fixed_sizes import Hindrance, fixed_sizes
from precedent_cuda.ordered_attention import PIECE
from precedent_cuda.static_runner import StaticSettings
from precedent_cuda.static_shape import LEAST_KEYS


class CudaSupport(ModelSupport):
    """Forwards of fixed size: where `cuda_graphs` asks for them, and for `bitwise` on a GPU."""

    def bitwise(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Collection[int] | None:
        """The lengths at which a piece of keys, and a bucket of keys, overflows; `backend` does the rest."""
        return (PIECE + 1, LEAST_KEYS + 1) if _wanted(runner, options) else None

    def backend(self, runner: Runner, kv_shape: KVShape, options: TargetOptions) -> Backend | None:
        """Forwards of a few sizes as CUDA graphs; with `bitwise`, all of them have `MOST_ROWS` rows."""
        if not _wanted(runner, options):
            return None
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


def _wanted(runner: Runner, options: TargetOptions) -> bool:
    return bool(options.cuda_graphs) or (options.bitwise and runner.device.type == "cuda")


SUPPORT = CudaSupport()
