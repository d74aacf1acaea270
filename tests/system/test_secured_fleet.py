"""A whole fleet that other machines may reach: keys, the fleet's secret and TLS on every door, and not one
secret to be seen."""

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.certificates import Certificate, certificate
from tests.system.fleets import Home, Running, until

pytestmark = pytest.mark.slow
ASK = {
    "model": "demo",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Tell me about the river."}],
}


@dataclass
class Secured:
    """The running fleet, its keys, and what vouches for it."""

    home: Home
    up: Running
    certificate: Certificate
    keys: Path
    key: str
    directory: Path

    @property
    def secret(self) -> str:
        return (self.directory / "fleet.secret").read_text().strip()

    def url(self, name: str) -> str:
        found = re.search(rf"^ +{name} +(https://127\.0\.0\.1:\d+)", self.up.output, re.MULTILINE)
        assert found is not None, self.up.output
        return found[1]

    def status(self, url: str, key: str | None, body: object = None) -> int:
        """Of an answer, over a connection of its own, to a client that trusts the authority as its file says
        now."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        context = ssl.create_default_context(cafile=str(self.certificate.ca))
        with httpx.Client(verify=context, trust_env=False, timeout=30, headers=headers) as client:
            return (client.get(url) if body is None else client.post(url, json=body)).status_code


@pytest.fixture
def secured(home: Home, tmp_path: Path) -> Iterator[Secured]:
    made = certificate(tmp_path, "127.0.0.1")
    keys = tmp_path / "keys"
    tls_settings = f'tls_cert = "{made.cert}"\ntls_key = "{made.key}"\n'
    settings = (
        f'[router]\nhost = "0.0.0.0"\nupstream_ca = "{made.ca}"\napi_key_file ='
        f' "{keys}"\n{tls_settings}[worker]\n{tls_settings}'
    )
    (home.state / "roost.toml").write_text(settings)
    key = home.output("key", "new", "acme", "--rights", "all").strip()
    up = home.start("up", "--engine", "simulated", "--ranks", "2", "--port", "0")
    try:
        up.says("Ctrl-C stops everything")
        directory = next((home.state / "roost").glob("run-*"))
        yield Secured(home, up, made, keys, key, directory)
    finally:
        assert up.stop() == 0


def test_every_door_speaks_tls_to_those_who_may_come_in_and_shows_no_secret(secured: Secured) -> None:
    router, rank = secured.url("router"), secured.url("engine-0")
    assert secured.status(f"{router}/v1/chat/completions", secured.key, ASK) == 200
    assert secured.status(f"{router}/v1/chat/completions", None, ASK) == 401
    assert secured.status(f"{router}/v1/chat/completions", secured.secret, ASK) == 401
    (secured.home.state / "key").write_text(secured.key)
    explained = secured.home.output(
        "explain",
        "the river",
        "--router",
        router,
        "--api-key-file",
        "key",
        "--ca",
        str(secured.certificate.ca),
    )
    assert "engine-0/" in explained
    assert secured.status(f"{rank}/v1/models", None) == 401
    assert secured.status(f"{rank}/simulate", secured.key) == 401
    assert secured.status(f"{rank}/simulate", secured.secret) == 200
    assert secured.status(f"{rank}/health", None) == 200
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(router.replace("https", "http"), trust_env=False)

    new = secured.home.output("key", "new", "acme").strip()
    assert secured.status(f"{router}/v1/models", new) == 401
    assert "api_key_file contents" in secured.home.output("reload")
    assert (
        secured.status(f"{router}/v1/models", new)
        == secured.status(f"{router}/v1/models", secured.key)
        == 200
    )

    seen = [secured.up.output, secured.home.output("config"), secured.home.output("config", "--running")]
    seen += [
        file.read_text()
        for file in secured.directory.rglob("*")
        if file.is_file() and file.suffix in (".log", ".json", ".toml")
    ]
    seen += [" ".join(process.cmdline()) for process in secured.up.children()]
    assert not [text for text in seen if any(one in text for one in (secured.key, new, secured.secret))]
    for file in (secured.keys, secured.directory / "fleet.secret"):
        assert file.stat().st_mode & 0o077 == 0


def test_certificates_of_router_and_ranks_are_renewed_by_a_reload(secured: Secured) -> None:
    router, rank = secured.url("router"), secured.url("engine-0")
    secured.certificate.renew("127.0.0.1")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        secured.status(f"{router}/health", None)
    secured.home.output("reload")
    for url in (router, rank):
        until(lambda url=url: _answers(secured, f"{url}/health"), f"{url} to show the new certificate")
    assert (
        secured.status(f"{router}/v1/chat/completions", secured.key, ASK) == 200
    )  # the router believes the ranks' new authority, too


def _answers(secured: Secured, url: str) -> bool:
    try:
        return secured.status(url, None) == 200
    except httpx.ConnectError:
        return False
