"""HTTP servers of the ranks of one SGLang server: one application, which tells them apart by port."""

from collections.abc import Mapping

from engine_adapter.serving.authentication import RouterAuthentication
from engine_adapter.serving.http import RankApp, RankTracing, Receive, Scope, Send
from engine_adapter.sglang.rank import SglangRank


class SglangHttp:
    """ASGI application. ranks: the rank of each port, with the recorder of its spans."""

    def __init__(
        self, ranks: Mapping[int, tuple[SglangRank, RankTracing]], admission: RouterAuthentication
    ) -> None:
        self._apps = {port: RankApp(rank, tracing, admission) for port, (rank, tracing) in ranks.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = next(iter(self._apps.values()))
        app = self._apps[scope["server"][1]] if scope["type"] == "http" else first
        await app(scope, receive, send)
