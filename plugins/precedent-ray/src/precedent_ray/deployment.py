"""The Ray Serve deployment around the server's own application."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from precedent_ray.ingress import IMPORT_PATH, VARIABLE
from precedent_ray.replica import Replica, merged
from precedent_ray.settings import Settings

log = logging.getLogger("precedent.ray")

NAME = "Precedent"

HEALTH_SECONDS, HEALTH_TIMEOUT_SECONDS = 5, 30
METRICS_TIMEOUT_SECONDS = 5.0
"""How long `/metrics` waits for the other replicas."""

HEADROOM = 64
"""Requests that a replica takes beyond its places: they are refused there in OpenAI's form, health checks answered."""


@serve.ingress()
class Served:
    """One replica: the server's application, and what Ray asks of it."""

    def __init__(self, settings: Settings) -> None:
        self._held = ExitStack()
        self._replica = self._held.enter_context(Replica(settings, serve.get_replica_context().replica_tag))

    def __serve_build_asgi_app__(self) -> Any:
        """The application, once the models are loaded."""
        return self._replica.app(self._metrics_of_all)

    def check_health(self) -> None:
        """Raise an error if the engine is stuck or closed: Ray then replaces this replica."""
        self._replica.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler is told besides the number of requests."""
        return self._replica.load()

    async def metrics(self) -> tuple[str, str]:
        """This replica's name and metrics."""
        return self._replica.name, await self._replica.metrics()

    async def _metrics_of_all(self) -> str:
        here = serve.get_replica_context()
        asked = serve.get_deployment_handle(here.deployment, here.app_name).broadcast("metrics")
        found = await asked.results_async(timeout_s=METRICS_TIMEOUT_SECONDS, return_exceptions=True)
        texts = dict([await self.metrics()])
        texts |= dict(one for one in found if not isinstance(one, BaseException))  # a replica may just have ended
        return merged(dict(sorted(texts.items())))

    def __del__(self) -> None:
        """Close engines, then the cache; Ray calls this once the last answer has ended."""
        self._held.close()


def application(settings: Settings) -> Application:
    """The deployment of these settings, bound; Ray's own settings can be replaced in a config file."""
    if os.environ.get(VARIABLE) != IMPORT_PATH:
        log.warning(
            "streams of a replica that is lost will end without an error event: set %s=%s", VARIABLE, IMPORT_PATH
        )
    deployed = serve.deployment(Served).options(name=NAME, **ray_options(settings))
    bound: Application = deployed.bind(settings)
    return bound


def ray_options(settings: Settings) -> dict[str, Any]:
    """What Ray is told of a deployment."""
    return {
        **_number_of_replicas(settings),
        "max_ongoing_requests": settings.max_queued + HEADROOM,
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_timeout_s": settings.shutdown_seconds,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": RequestRouterConfig(
            request_router_class="precedent_ray.router:TenantRouter",
            request_router_kwargs={
                "api_keys": settings.api_keys,
                "spread_from": settings.target_ongoing_requests,
            },
        ),
    }


def _number_of_replicas(settings: Settings) -> dict[str, Any]:
    if settings.min_replicas == settings.max_replicas:
        return {"num_replicas": settings.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="precedent_ray.scaling:Scaling",
        policy_kwargs={
            "target_ongoing_requests": settings.target_ongoing_requests,
            "target_queue_seconds": settings.target_queue_seconds,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.target_ongoing_requests,
            upscale_delay_s=settings.upscale_seconds,
            downscale_delay_s=settings.downscale_seconds,
            policy=policy,
        )
    }
