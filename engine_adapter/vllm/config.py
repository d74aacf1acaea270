"""Settings of the agent of a vLLM deployment. Read once, by the composition root."""

from dataclasses import dataclass

from engine_adapter.config import checked_url
from fleet.settings import FilePath, NonNegative, Positive, PositiveInt, check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """Settings of the agent of one vLLM deployment (`roost worker --engine vllm`). ValueError names the
    setting that is out of range."""

    urls: tuple[str, ...] = ()
    """Base URLs of vLLM's HTTP servers, with or without /v1 at the end. One: a server whose data-parallel
    ranks share it. Several: one for each rank, in order (--data-parallel-multi-port-external-lb)."""
    model: str | None = None
    """Name of the served model that requests use. None: the first one that the server lists."""
    api_key_file: FilePath | None = None
    """File whose first line is the server's key (vLLM's --api-key)."""
    tokenizer: FilePath | None = None
    """Folder with the model's tokenizer.json. None: the folder that the server names as the model's root, if
    it is on this machine. Without a tokenizer, prompts are routed by guesses, not by the exact blocks of
    vLLM's caches."""
    chat_template: FilePath | None = None
    """File with the chat template, if vLLM was started with --chat-template. None: that of the tokenizer's
    folder."""
    kv_endpoint: str | None = None
    """ZMQ endpoint of the KV events of rank 0, for versions of vLLM without /kv_event_sources. The ports of
    further ranks follow it. None: as the server says."""
    kv_replay_endpoint: str | None = None
    """ZMQ endpoint at which rank 0 repeats lost KV events, likewise."""
    max_batch_tokens: PositiveInt = 2048
    """vLLM's --max-num-batched-tokens, which its server does not report."""
    load_seconds: Positive = 1.0
    """Interval between two readings of the server's load. Each reading also shows whether it is alive."""
    answer_seconds: Positive = 5.0
    """Time limit of one request to the server."""
    misses: PositiveInt = 3
    """Consecutive failed readings after which the server counts as gone."""
    listen: str = "127.0.0.1:7200"
    """Address at which the plugin in vLLM's worker processes connects to the agent."""
    secret_file: FilePath | None = None
    """File with the secret that agent and plugin share. It is created if it is missing. None: a file of this
    user, by the engine's name."""
    insecure: bool = False
    """Allow to listen for other machines: placements and reports of the plugin are authenticated, but not
    encrypted."""
    plugin_seconds: NonNegative = 15.0
    """Time that a vLLM whose workers have not connected waits before it joins without its experts. When they
    connect later, it joins again."""
    report_seconds: Positive = 1.0
    """Interval of the plugin's reports of demand."""
    vote_steps: PositiveInt = 16
    """Engine steps between two votes of the workers on a new placement."""
    nudge: bool = True
    """Send a short request of the agent's own when a placement waits and the engine makes no step. false: the
    plan waits for traffic."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for url in self.urls:
            checked_url(url, "vllm: urls")
        if len(set(self.bases)) < len(self.urls):
            raise ValueError(f"vllm: urls names a server twice: {', '.join(self.urls)}")
        if self.kv_replay_endpoint is not None and self.kv_endpoint is None:
            raise ValueError("vllm: kv_replay_endpoint needs kv_endpoint")
        _ = self.address

    @property
    def bases(self) -> tuple[str, ...]:
        """URL prefixes of the /v1/... paths."""
        return tuple(url.rstrip("/").removesuffix("/v1") for url in self.urls)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`. ValueError when it is no address."""
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535:
            raise ValueError(f"vllm: listen = {self.listen!r} must be HOST:PORT, e.g. 127.0.0.1:7200")
        return host.removeprefix("[").removesuffix("]"), int(port)
