"""llama.cpp as a back end: which sources it takes, and how they are loaded."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from precedent.errors import ConfigError, ModelLoadError, PrecedentError, UnsupportedError
from precedent.target.contract import Target
from precedent.target.support import ModelSource, ModelSupport, TargetOptions

__all__ = ["SUPPORT"]

NAME = "llama.cpp"

WHY_NOT = {
    "bitwise": "its rows round differently beside others",
    "cuda_graphs": "it makes its own",
    "dtype": "it computes a file as it is stored",
    "device": "n_gpu_layers=… says what goes to a GPU",
}
"""Options that it cannot have, and the reason."""

REPACKED = ("Q4_0", "Q4_K", "Q2_K", "IQ4_NL")
"""Types of weights that it repacks for kernels which compute several rows together."""


class LlamaCpp(ModelSupport):
    """Runs GGUF files where `backend` asks for it; "auto" does on devices that llama.cpp alone computes on."""

    def recognises(self, source: ModelSource, options: TargetOptions) -> bool:
        """Whether llama.cpp runs this source. Raises UnsupportedError for what it cannot have."""
        file = source.place if isinstance(source.place, Path) and source.place.is_file() else None
        if options.backend == "auto":
            return file is not None and _pays(file)
        if options.backend != NAME:
            return False
        if file is None:
            raise UnsupportedError(f"backend={NAME!r} runs GGUF files, and {source.place} is none: leave backend= out")
        for option, why in WHY_NOT.items():
            value = getattr(options, option)
            if value and not (option == "device" and value == "cpu"):
                raise UnsupportedError(f"{option}={value!r} does not work with backend={NAME!r} ({why}): leave it out")
        return True

    def load(self, source: ModelSource, options: TargetOptions) -> Target:
        """The file as a target. Raises ModelLoadError, UnsupportedError or ConfigError."""
        from precedent.target.load.gguf import open_gguf
        from precedent_llama_cpp.context import LlamaContext
        from precedent_llama_cpp.target import LlamaTarget, mapped_tensors

        file = Path(str(source.place))
        content = open_gguf(file)
        settings = dict(options.model_kwargs)
        if options.n_gpu_layers is not None:
            if "n_gpu_layers" in settings:
                raise ConfigError("n_gpu_layers is given twice: leave it out of model_kwargs")
            settings["n_gpu_layers"] = options.n_gpu_layers
        elif options.device == "cpu":
            settings["n_gpu_layers"] = 0
        context = LlamaContext(file, settings)
        config = _config(file, content.metadata)
        repacked = context.repacks and max(content.nbytes_by_kind.items(), key=itemgetter(1))[0] in REPACKED
        weights = mapped_tensors(content.entries)
        return LlamaTarget(context, config, source.generation_config, weights, repacked=repacked)


def _pays(file: Path) -> bool:
    """Whether llama.cpp can use a device that our kernels do not know, or knows an architecture that they do not."""
    from precedent.target.load.gguf import read_config
    from precedent_llama_cpp.context import library

    try:
        if library().llama_supports_gpu_offload():
            return True
    except UnsupportedError:
        return False
    try:
        read_config(file)
    except PrecedentError:
        return True
    return False


def _config(file: Path, metadata: Any) -> PreTrainedConfig:
    """What transformers makes of the header; a bare config where it does not know the architecture."""
    from precedent.target.load.gguf import read_config

    try:
        return read_config(file)
    except (ModelLoadError, UnsupportedError):
        return PreTrainedConfig(name_or_path=str(file), architecture=str(metadata.get("general.architecture")))


SUPPORT = LlamaCpp()
