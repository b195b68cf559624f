"""Stores of other programs in Ollama's and LM Studio's layouts, holding a file that is linked and not copied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LAYER = "application/vnd.ollama.image."


class OllamaStore:
    """A store in a folder; `add` writes a model as `ollama pull` and `ollama create` do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, content: bytes | Path) -> dict[str, Any]:
        """Write a layer's content, or link to a file; returns its digest and size."""
        if isinstance(content, Path):
            digest, size = hashlib.sha256(str(content).encode()).hexdigest(), content.stat().st_size
        else:
            digest, size = hashlib.sha256(content).hexdigest(), len(content)
        path = self.folder / "blobs" / f"sha256-{digest}"
        if not path.exists() and isinstance(content, Path):
            path.symlink_to(content)
        elif not isinstance(content, Path):
            path.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": size}

    def add(
        self,
        name: str,
        model: Path | bytes,
        *,
        params: Mapping[str, Any] | None = None,
        manifests: str = "manifests",
        **layers: str,
    ) -> Path:
        """Write a model under `HOST/NAMESPACE/MODEL/TAG`, with texts of further layers; returns its manifest."""
        texts = {**layers, **({} if params is None else {"params": json.dumps(params)})}
        listed = [{"mediaType": f"{LAYER}model", **self.blob(model)}]
        listed += [{"mediaType": f"{LAYER}{kind}", **self.blob(text.encode())} for kind, text in texts.items()]
        return self.write(name, {"schemaVersion": 2, "layers": listed}, manifests)

    def write(self, name: str, manifest: object, manifests: str = "manifests") -> Path:
        """Write a manifest as it is given."""
        path = self.folder / manifests / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest), encoding="utf-8")
        return path


def lm_studio(home: Path, *files: str, model: Path) -> Path:
    """Link a file into LM Studio's folder below a home directory, as PUBLISHER/MODEL/FILE; returns the folder."""
    folder = home / ".lmstudio" / "models"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(model)
    return folder
