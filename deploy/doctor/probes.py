"""Probes of a deployment. They ask and listen, and change nothing; each returns values for `judgements`."""

import asyncio
import contextlib
import os
import resource
import shutil
import ssl
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from bus import Bus, BusError, BusTimeout, Declined, Message, NobodyThere, Received
from bus.config import BusConfig
from bus.nats.link import Link
from bus.nats.server_report import ServerReport, server_report
from bus.protocol.subjects import Subjects, engine_of
from deploy.doctor.judgements import DoorReport, SecretFile, SpaceReport
from deploy.security.tls import CertificateError, ServerTls
from fleet.completions import PROTOCOL_HEADER
from fleet.facts.demand import TrackerHeartbeat
from fleet.facts.engines import EngineHeartbeat, EngineJoined, EngineLeft
from fleet.requests.control_loop import DescribeLoop, LoopDescribed
from fleet.requests.demand import DescribeProfile
from fleet.requests.routing import RouteReleased

ASK_SECONDS = 2.0
DOOR_SECONDS = 5.0
DOORS_AT_ONCE = 32
SHARED_MEMORY = "/dev/shm"
HEALTH_PATH = "/health"


async def ask_server(config: BusConfig) -> ServerReport:
    """Connect with the login of the settings, and return the server's report. BusError says why not."""
    link = Link(config, "roost doctor")
    try:
        await link.open()
        return await server_report(link)
    finally:
        await link.close()


class HeardMessages:
    """Result of listening to everything for a while."""

    def __init__(self) -> None:
        self._offsets: dict[tuple[str, int], float] = {}
        """by publisher: seconds by which its clock seems ahead of ours. Messages are late at times and never
        early, so the largest difference seen is the nearest
        """
        self.beating: set[str] = set()
        """engines that sent a heartbeat"""
        self.tracker_protocol: int | None = None
        """protocol that the tracker states; None: it has sent no heartbeat"""

    @property
    def offsets(self) -> dict[str, float]:
        """By engine, or by subject of other publishers: seconds by which the clock that differs most is
        ahead.
        """
        worst: dict[str, float] = {}
        for (name, _), offset in self._offsets.items():
            worst[name] = max(worst.get(name, 0.0), offset, key=abs)
        return worst

    def note(self, received: Received, at: float) -> None:
        """Add a message that arrived at a time of our clock, Unix seconds."""
        engine = engine_of(received.subject) or getattr(received.message, "engine", None)
        name = f"engine {engine}" if engine else f"the publisher on {received.subject}"
        publisher, offset = (name, received.publisher_id), received.published_at - at
        self._offsets[publisher] = max(self._offsets.get(publisher, offset), offset)
        if isinstance(received.message, EngineHeartbeat):
            self.beating.add(received.message.engine)
        if isinstance(received.message, TrackerHeartbeat):
            self.tracker_protocol = received.message.protocol


async def listen(bus: Bus, subjects: Subjects, seconds: float) -> HeardMessages:
    """Listen to all messages of the namespace. BusError if the user may not."""
    heard = HeardMessages()
    async with bus.subscribe(subjects.everything) as subscription:
        with contextlib.suppress(TimeoutError):  # the listening time is over
            async with asyncio.timeout(seconds):
                async for received in subscription:
                    heard.note(received, time.time())
    return heard


async def joined_engines(bus: Bus, subjects: Subjects) -> list[EngineJoined]:
    """Return the engines that have joined and not left, those of any protocol included."""
    last: dict[str, EngineJoined | EngineLeft] = {}
    async for received in bus.replay(subjects.membership(), latest=True, follow=False):
        if isinstance(received.message, EngineJoined | EngineLeft):
            last[received.message.engine] = received.message
    return [joined for _, joined in sorted(last.items()) if isinstance(joined, EngineJoined)]


async def planner_protocol(bus: Bus, subjects: Subjects) -> int | None:
    """Return the protocol of the planner; None: none answers."""
    try:
        answer = await bus.request(subjects.loop, DescribeLoop(), ASK_SECONDS)
    except BusError:
        return None
    return answer.protocol if isinstance(answer, LoopDescribed) else 0


async def answering_parts(bus: Bus, subjects: Subjects) -> Mapping[str, bool]:
    """Return which of planner, tracker and router answer. The release of an unknown id changes nothing."""
    questions: dict[str, tuple[str, Message]] = {
        "planner": (subjects.loop, DescribeLoop()),
        "tracker": (subjects.describe_profile, DescribeProfile(model="")),
        "router": (subjects.release, RouteReleased(id="roost-doctor", first_token=False)),
    }
    found = await asyncio.gather(*(_answers(bus, *question) for question in questions.values()))
    return dict(zip(questions, found, strict=True))


async def _answers(bus: Bus, subject: str, question: Message) -> bool:
    try:
        await bus.request(subject, question, ASK_SECONDS)
    except Declined:
        return True
    except (NobodyThere, BusTimeout):
        return False
    except BusError:
        return True  # an answer that cannot be read is one
    return True


async def knock(doors: Iterable[tuple[str, str]], ca: Path | None, expected: bytes = b"") -> list[DoorReport]:
    """Ask HTTP servers, by name and URL, for their health. ca: trusted authorities, besides the system's.
    expected: part of the answer of a server that is well.

    OSError if `ca` cannot be used.
    """
    trust = ssl.create_default_context()
    if ca is not None:
        trust.load_verify_locations(ca)
    places, limit = asyncio.Semaphore(DOORS_AT_ONCE), aiohttp.ClientTimeout(total=DOOR_SECONDS)
    connector = aiohttp.TCPConnector(ssl=trust)
    async with aiohttp.ClientSession(connector=connector, timeout=limit, trust_env=False) as http:

        async def one(name: str, url: str) -> DoorReport:
            async with places:
                return await _knock(http, trust, name, url, expected)

        return await asyncio.gather(*(one(name, url) for name, url in dict.fromkeys(doors)))


async def _knock(
    http: aiohttp.ClientSession, trust: ssl.SSLContext, name: str, url: str, expected: bytes
) -> DoorReport:
    ends, started = None, time.perf_counter()
    try:
        if url.startswith("https"):
            ends = await _certificate_end(url, trust)
        async with http.get(url.rstrip("/") + HEALTH_PATH, allow_redirects=False) as answer:
            other = answer.status == 200 and expected not in await answer.read()
            stated = answer.headers.get(PROTOCOL_HEADER, "")
    except ssl.SSLError as error:
        return DoorReport(name, url, None, error.reason or str(error), untrusted=True)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return DoorReport(name, url, None, str(error) or f"nothing within {DOOR_SECONDS:g} s")
    seconds = time.perf_counter() - started
    return DoorReport(
        name,
        url,
        answer.status,
        seconds=seconds,
        certificate_ends=ends,
        is_other_program=other,
        protocol=int(stated) if stated.isdecimal() else None,
    )


async def _certificate_end(url: str, trust: ssl.SSLContext) -> float | None:
    """Return the end of a server's certificate, Unix seconds. OSError without a verified connection."""
    parts = urlsplit(url)
    async with asyncio.timeout(DOOR_SECONDS):
        _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, ssl=trust)
    try:
        certificate = writer.get_extra_info("peercert")
        return ssl.cert_time_to_seconds(str(certificate["notAfter"])) if certificate else None
    finally:
        writer.transport.abort()


def spaces(run_directories: Path) -> list[SpaceReport]:
    """Return the file systems that parts write to on this machine."""
    existing = next(folder for folder in (run_directories, *run_directories.parents) if folder.is_dir())
    found = []
    for kind, path in (("disk", str(existing)), ("shared memory", SHARED_MEMORY)):
        if os.path.isdir(path):
            usage = shutil.disk_usage(path)
            found.append(SpaceReport(kind, path, usage.free, usage.total))  # type: ignore[arg-type]
    return found


def certificate_fault(cert: Path | None, key: Path | None) -> str | None:
    """Return why a server cannot use its certificate; None: it can, or has none."""
    try:
        ServerTls.of(cert, key)
    except CertificateError as error:
        return str(error)
    return None


def descriptor_limit() -> int:
    """Return the number of files that a process may open once it raises its limit, as parts do."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (1 << 20) if hard == resource.RLIM_INFINITY else hard


def secret_files(paths: Iterable[Path | str | None]) -> list[SecretFile]:
    """Return those that exist, with their permissions."""
    files = [Path(path) for path in paths if path is not None]
    return [SecretFile(str(file), stat.S_IMODE(file.stat().st_mode)) for file in files if file.is_file()]
