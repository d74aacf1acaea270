"""Settings of the agent of an SGLang server. Read once, by the composition root."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from engine_adapter.config import checked_url
from fleet.settings import FilePath, Positive, PositiveInt, check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """Settings of the agent of one SGLang server (`roost worker --engine sglang`), which was never run with
    SGLang. ValueError names the setting that is out of range."""

    url: str | None = None
    """Base URL of SGLang's HTTP server, with or without /v1 at the end."""
    api_key_file: FilePath | None = None
    """File whose first line is the server's key (SGLang's --api-key). The recorder needs the key of
    administrators (--admin-api-key), if the server has one."""
    tokenizer: FilePath | None = None
    """Folder with the model's tokenizer.json and config.json. None: the folder that the server names, if it
    is on this machine. Requests go to SGLang by their token ids, so a tokenizer is needed."""
    kv_endpoint: str | None = None
    """ZMQ endpoint of the KV events of rank 0, for versions of SGLang whose /server_info does not name it.
    The ports of further ranks follow it. None: as the server says."""
    kv_replay_endpoint: str | None = None
    """ZMQ endpoint at which rank 0 repeats lost KV events, likewise."""
    load_seconds: Positive = 1.0
    """Interval between two readings of the server's load. Each reading also shows whether it is alive."""
    answer_seconds: Positive = 5.0
    """Time limit of one question to the server, and of a connection for a request."""
    misses: PositiveInt = 3
    """Consecutive failed readings after which the server counts as gone."""
    routed_share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the requests that are asked for the experts of their tokens, if the server was started with
    --enable-return-routed-experts. An answer then carries 4 bytes per token, layer and expert."""
    recorder_folder: FilePath | None = None
    """Folder of SGLang's expert distribution recorder (SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR), on this
    machine. The agent learns demand from its files. None: it does not."""
    recorder_seconds: Positive = 60.0
    """Interval at which the agent has the recorder write its counts. Where SGLang's own EPLB uses the
    recorder, the agent never touches it, and only reads the files that are written there."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.url is not None:
            checked_url(self.url, "sglang: url")
        if self.kv_replay_endpoint is not None and self.kv_endpoint is None:
            raise ValueError("sglang: kv_replay_endpoint needs kv_endpoint")

    @property
    def base(self) -> str:
        """URL prefix of the server's paths. ValueError when no URL is set."""
        if self.url is None:
            raise ValueError("sglang: url is not set")
        return self.url.rstrip("/").removesuffix("/v1")
