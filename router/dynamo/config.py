"""Settings of a router inside a Dynamo deployment. Read once, by the composition root.

Where discovery, requests and events are is not set here: Dynamo's own variables say it to all of a
deployment.
"""

from dataclasses import dataclass

from fleet.experts import ModelShape
from fleet.settings import NonNegative, NonNegativeInt, Positive, Share, check_bounds
from router.dynamo.wire.discovery import EndpointName


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoConfig:
    """Settings of `roost router --dynamo`. ValueError names the setting that is out of range."""

    namespace: str | None = None
    """Dynamo namespace whose workers are routed to; unset: the router has nothing to do with Dynamo"""
    endpoint: str = "roost.router.generate"
    """namespace.component.endpoint under which the router itself is registered. Frontends are started with
    --namespace and the namespace of this endpoint, so that they see the router and not the workers
    """
    model: str | None = None
    """model that the router offers; unset: that of the first worker it finds"""
    frontend_migration_limit: NonNegativeInt | None = None
    """--migration-limit of the frontends. It must be 0: the router itself continues broken answers, and two
    that do so would send a request twice. Unset: Dynamo's own variable DYN_MIGRATION_LIMIT tells
    """
    poll_seconds: Positive = 0.25
    """interval between two readings of discovery"""
    routed_experts_share: Share = 0.0
    """share of the requests whose worker is asked for the experts of each token, for the tracker; needs
    layers, experts and top_k. vLLM and SGLang answer if they run with --enable-return-routed-experts
    """
    kv_transfer_token_seconds: NonNegative = 1e-5
    """expected time to copy the KV of one prompt token from a prefill worker to a decode worker. It prices
    decode workers by what they lack of a prompt; 1e-5 is 200 kB a token at 20 GB/s
    """
    layers: NonNegativeInt = 0
    """MoE layers of the model; 0: unknown, like the next two"""
    experts: NonNegativeInt = 0
    """routed experts of a layer"""
    top_k: NonNegativeInt = 0
    """routed experts of a token"""

    def __post_init__(self) -> None:
        check_bounds(self)
        _ = self.own_endpoint
        if self.namespace is not None and self.own_endpoint.namespace == self.namespace:
            raise ValueError(
                f"dynamo: endpoint = {self.endpoint!r} is in the namespace of the workers, where a frontend"
                f" would see both; choose another namespace than {self.namespace!r}"
            )
        if len({bool(self.layers), bool(self.experts), bool(self.top_k)}) > 1:
            raise ValueError("dynamo: layers, experts and top_k belong together; set all or none")
        if self.routed_experts_share and self.shape is None:
            raise ValueError("dynamo: routed_experts_share needs layers, experts and top_k")
        _ = self.shape

    @property
    def own_endpoint(self) -> EndpointName:
        """The router's endpoint. ValueError when it has not three parts."""
        parts = self.endpoint.split(".")
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"dynamo: endpoint = {self.endpoint!r} must be namespace.component.endpoint")
        return EndpointName(*parts)

    @property
    def shape(self) -> ModelShape | None:
        """Shape of the model's MoE layers; None: not stated."""
        if not self.layers:
            return None
        return ModelShape(
            layers=self.layers, experts=self.experts, top_k=self.top_k, hidden=1, expert_intermediate=1
        )
