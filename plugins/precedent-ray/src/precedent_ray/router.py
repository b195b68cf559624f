"""Sends a tenant's requests to the replica where its memory is warm; runs wherever Ray routes, in proxies above all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from precedent_ray.routing import preferred, scope_of, tenant_of, with_room
from precedent_server.keys import KeyFile


class TenantRouter(RequestRouter):
    """Rendezvous hashing on the tenant of the API key, with bounded loads; what clients say of sessions counts nothing.

    Loads are those that this router knows of: several proxies see their own and, with each answer, the replica's.
    """

    def initialize_state(self, api_keys: str | None = None, spread_from: int = 16) -> None:
        """Take the settings of `request_router_kwargs`. Raises ConfigError for a key file that cannot be used."""
        self._keys = None if api_keys is None else KeyFile(Path(api_keys))
        self._spread_from = spread_from

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas one by one, in the order in which they are tried."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # between rounds in which all replicas were full
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {name: self._load(each) for name, each in replicas.items()}
        order = preferred(self._key(pending_request), replicas)
        return [[replicas[name]] for name in with_room(order, loads, spread_from=self._spread_from)]

    def _key(self, request: PendingRequest) -> str:
        """The tenant; a request without one goes anywhere."""
        scope = scope_of(request.args)
        tenant = None if scope is None else tenant_of(scope, self._keys)
        return request.metadata.internal_request_id if tenant is None else f"tenant {tenant}"

    def _load(self, replica: Any) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0
