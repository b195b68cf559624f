"""Precedent's server as a Ray Serve application: `serve run precedent_ray:app model=… cache=postgresql://…`.

The modules that decide (`settings`, `routing`, `scaling`, `replica`, `ingress`) import no Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app"]


def app(args: dict[str, Any]) -> Application:
    """The application for `serve run` and for a config file's `import_path`; `args` are those of `Settings`.

    Raises ConfigError for an argument that does not exist or fit, before anything is started.
    """
    from precedent_ray.deployment import application
    from precedent_ray.settings import Settings

    return application(Settings.of(args))
