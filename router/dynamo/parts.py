"""Parts that all requests of one router in Dynamo share."""

from typing import NamedTuple

from router.dynamo.config import DynamoConfig
from router.dynamo.follower import WorkerFollower
from router.dynamo.ports import WorkerCalls
from router.service import RouterService


class DynamoParts(NamedTuple):
    """Parts of a router in Dynamo that serve a request."""

    service: RouterService
    config: DynamoConfig
    follower: WorkerFollower
    calls: WorkerCalls
