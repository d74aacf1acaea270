"""Strangers who reach a rank's port; and the fleet's secret changed without a request lost."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine_adapter.serving.authentication import NoSecret, RouterAuthentication
from fleet.shared_secret import SharedSecret
from tests.router.router_fixture import House, OpenHouse, until
from tests.simulated_engines import simulated_engine

OLD, NEW = "old-secret-of-the-fleet", "new-secret-of-the-fleet"
ASK = {
    "model": "demo",
    "seed": 5,
    "max_tokens": 3,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Tell me about the river."}],
}
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 2}
ROUTES = (
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("GET", "/simulate"),
    ("POST", "/simulate"),
    ("GET", "/else"),
    ("GET", "/health/"),
)


@dataclass
class Files:
    """What router and ranks read: each has a file of its own, as on two machines."""

    router: Path
    rank: Path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    found = Files(tmp_path / "router.secret", tmp_path / "rank.secret")
    for file in (found.router, found.rank):
        file.write_text(f"# of the fleet\n{OLD}\n")
    return found


async def serving(house: House) -> None:
    await until(lambda: house.service.ready and len(house.service.view.target_table("demo").targets) == 2)


async def test_a_rank_answers_no_stranger_but_says_that_it_lives(open_house: OpenHouse, files: Files) -> None:
    house = await open_house(fleet_secret_file=files.router)
    async with (
        simulated_engine(house.bus, house.subjects, admission=RouterAuthentication(files.rank)) as host,
        httpx.AsyncClient(trust_env=False) as stranger,
    ):
        await serving(house)
        for url in host.identity.urls:
            for header in (None, "Bearer wrong", f"Basic {OLD}", OLD, f"Bearer {OLD[:-1]}", f"Bearer  {OLD}"):
                headers = {} if header is None else {"authorization": header}
                for method, path in ROUTES:
                    refused = await stranger.request(method, url + path, json=PROMPT, headers=headers)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (
                        401,
                        "invalid_api_key",
                    ), (method, path, header)
            assert (await stranger.get(f"{url}/health")).json() == {"status": "ok"}
            assert (
                await stranger.post(
                    f"{url}/v1/completions", json=PROMPT, headers={"authorization": f"Bearer {OLD}"}
                )
            ).status_code == 200
        assert (await house.post("/v1/chat/completions", ASK)).status == 200


async def test_a_router_without_the_secret_gets_no_answer_and_says_why(
    open_house: OpenHouse, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    house = await open_house()
    async with simulated_engine(house.bus, house.subjects, admission=RouterAuthentication(files.rank)):
        await serving(house)
        assert (await house.post("/v1/chat/completions", ASK)).status == 503
    assert "fleet_secret_file" in caplog.text
    assert OLD not in caplog.text


async def test_the_secret_changes_while_requests_are_served(
    open_house: OpenHouse, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    house, admission = await open_house(fleet_secret_file=files.router), RouterAuthentication(files.rank)
    async with (
        simulated_engine(house.bus, house.subjects, admission=admission) as host,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        await serving(house)

        async def status(secret: str) -> int:
            headers = {"authorization": f"Bearer {secret}"}
            return (
                await client.post(f"{host.identity.urls[0]}/v1/completions", json=PROMPT, headers=headers)
            ).status_code

        async def works() -> bool:
            return (await house.post("/v1/chat/completions", ASK)).status == 200

        files.rank.write_text(f"{OLD}\n{NEW}\n")  # first ranks learn the new one beside the old one,
        admission.reload()
        assert (await status(OLD), await status(NEW), await works()) == (200, 200, True)
        files.router.write_text(f"{NEW}\n")  # then routers present it,
        report = await house.service.reload(lambda: house.service.config)
        assert report.changed == {"fleet_secret_file contents": ("one secret", "one secret, not the same")}
        assert await works()
        files.rank.write_text(f"{NEW}\n")  # and the old one goes
        admission.reload()
        assert (await status(OLD), await status(NEW), await works()) == (401, 200, True)
        files.rank.write_text("short\n")
        admission.reload()
        assert (await status(NEW), await works()) == (200, True)
    assert "the fleet's secret is unchanged" in caplog.text
    assert OLD not in caplog.text
    assert NEW not in caplog.text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# none\n", "it holds 0"),
        ("a\nb\nc\n", "it holds 3"),
        ("too-short", "secret 1 must be at least 16"),
        (f"{OLD}\nwith some blanks in it", "secret 2 must be"),
    ],
)
def test_a_file_that_is_no_secret_is_refused_without_repeating_it(
    text: str, complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(NoSecret, match=complaint) as refused:
        RouterAuthentication(file)
    assert not any(word in str(refused.value) for word in ("too-short", OLD, "blanks"))


def test_a_derived_key_tells_its_parts_apart_and_shows_in_no_text() -> None:
    secret, other = SharedSecret(OLD), SharedSecret(NEW, OLD)
    keys = {secret.derive("ab", "c"), secret.derive("a", "bc"), secret.derive("abc"), other.derive("ab", "c")}
    assert len(keys) == 4
    assert secret.derive("ab", "c") == SharedSecret(OLD, NEW).derive("ab", "c")
    assert OLD not in f"{secret} {secret!r} {other}"
