"""Which of several replicas answers a request: names and loads in, an order out.

It does not depend on HTTP, Ray, models or caches, so it can run in a proxy.
"""

from precedent.routing.affinity import preferred, with_room

__all__ = ["preferred", "with_room"]
