"""Python client of a router: decisions, reservations, the fleet's state, plans, and events.

Admission rule: code that a program needs to speak HTTP with a router. Answers are the records that the router
itself writes, so that there is one definition of each. It needs aiohttp and msgspec, and no bus.

    async with RoostClient("http://127.0.0.1:8000", api_key) as roost:
        async with roost.reserved({"model": "m", "prompt": [1, 2, 3]}) as chosen:
            ...  # send the request to chosen.url
        async for event in roost.migrations():
            print(event)
"""

from client.event_parser import MissedEvents, ReceivedEvent
from client.roost_client import MIGRATION_KINDS, RoostClient, RoostError

__all__ = ["MIGRATION_KINDS", "MissedEvents", "ReceivedEvent", "RoostClient", "RoostError"]
