"""Which of several replicas answers a request: names and loads in, an order out.

Knows nothing of HTTP, Ray, models or caches, so that what runs in a proxy and what a replay simulates is one function.
"""

from precedent.routing.affinity import preferred, with_room

__all__ = ["preferred", "with_room"]
