"""Virtual users of a fleet: they come when they come, change their subject, and know what they should be
told.

The rule that every request is held to: it is answered whole, or it is refused before any of its answer with a
status that says to come again (429, 503) and answered when it does. A connection may break only when the
router process behind it was killed; then the client asks again, as a load balancer would. A router that is
stopped gently may refuse what it was not asked yet, and breaks nothing off. Anything else (an error within a
stream, another status, a wrong token, no answer in time) is a lost request.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import aiohttp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.demo_model.heldout import read_documents
from deploy.sections import DEMO_CHECKPOINT
from tests.system.fleets import MODEL
from tests.system.migration_clients import MARGIN, Answer, margins

TOKENS = 24
PROMPT_TOKENS = 96
BEGINNINGS = (0, 200, 400)
"""of a document, at which prompts begin; in tokens"""
PATIENCE_SECONDS = 900.0
"""a request that is not answered after so long, with everything tried, is lost"""
ONE_TRY_SECONDS = 600.0
COME_AGAIN = (429, 503)
TAG_LENGTH = 8
"""hex digits at the beginning of a decision's id that name the router process"""
LONGEST_PAUSE_SECONDS = 5.0
MOST_OPEN = 400
"""requests at once; users who find so many go away, and are counted"""


class Prompt(NamedTuple):
    """Its place in the collection of all prompts, and its tokens."""

    number: int
    domain: int
    ids: list[int]
    tokens: int = TOKENS
    """of its answer"""


class Prompts(Protocol):
    """A collection of prompts, by domain."""

    @property
    def domains(self) -> tuple[str, ...]: ...

    def any_of(self, domain: int, dice: np.random.Generator) -> Prompt: ...

    def expected(self, prompt: Prompt) -> list[int] | None:
        """The tokens of the answer, where they are known beforehand."""
        ...


def documents() -> dict[str, list[list[int]]]:
    """Texts that the demo model has never seen, as tokens, by domain."""
    tokenizer, found = (
        Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json")),
        dict[str, list[list[int]]](),
    )
    for document in read_documents("test"):
        found.setdefault(document.domain, []).append(
            list(tokenizer.encode(document.text.decode("utf-8", "replace")).ids)
        )
    return found


class Library:
    """Prompts by domain."""

    def __init__(self) -> None:
        several, numbers = documents(), itertools.count()
        self.domains = tuple(several)
        self._prompts = [
            [
                Prompt(next(numbers), at, ids[begin : begin + PROMPT_TOKENS])
                for ids in texts
                for begin in BEGINNINGS
            ]
            for at, texts in enumerate(several.values())
        ]

    def any_of(self, domain: int, dice: np.random.Generator) -> Prompt:
        return self._prompts[domain][int(dice.integers(len(self._prompts[domain])))]

    def expected(self, prompt: Prompt) -> list[int] | None:
        return None


class Tide(NamedTuple):
    """What users talk of for a while: float64 [domains] each, shares at its beginning and at its end."""

    kind: str
    seconds: float
    first: NDArray[np.float64]
    last: NDArray[np.float64]


def tides(domains: int, seconds: float, dice: np.random.Generator) -> list[Tide]:
    """Even, of two kinds, flipped and drifting, in an order that chance decides, until the time is full."""
    found: list[Tide] = []
    shares = _two(domains, dice, 0.5)
    while sum(tide.seconds for tide in found) < seconds:
        kind = str(dice.choice(["even", "two", "flip", "drift"], p=[0.15, 0.25, 0.35, 0.25]))
        length = float(dice.uniform(0.05, 0.12)) * seconds
        first = last = shares
        match kind:
            case "even":
                first = last = np.full(domains, 1.0 / domains)
            case "two":
                first = last = _two(domains, dice, 0.5)
            case "flip":
                order = np.argsort(shares)[::-1]
                first = last = np.zeros(domains)
                first[order[1]], first[order[0]] = 0.9, 0.1
            case "drift":
                last = _two(domains, dice, float(dice.uniform(0.3, 0.9)))
        found.append(Tide(kind, length, first, last))
        shares = last
    return found


def _two(domains: int, dice: np.random.Generator, share: float) -> NDArray[np.float64]:
    shares = np.zeros(domains)
    one, other = dice.permutation(domains)[:2]
    shares[one], shares[other] = share, 1.0 - share
    return shares


def shares_at(course: Sequence[Tide], seconds: float) -> NDArray[np.float64]:
    """float64 [domains], adding up to 1: what users talk of at a time after the beginning."""
    for tide in course:
        if seconds <= tide.seconds:
            part = seconds / tide.seconds
            return (1.0 - part) * tide.first + part * tide.last
        seconds -= tide.seconds
    return course[-1].last


Cause = Literal["refused", "not connected", "broken"]


@dataclass(frozen=True, slots=True)
class Break:
    """A connection that broke, or never stood. Seconds of the event loop."""

    requested_at: float
    at: float
    tag: str
    """of the router process that answered; empty: no head of an answer came"""
    cause: Cause


@dataclass(eq=False)
class Open:
    """One try of one request, from its asking on."""

    requested_at: float
    stream: bool
    tag: str = ""
    """of the router process that answers, once its head has come"""
    tokens: int = 0
    """that have come"""
    outcome: Literal["open", "finished", "broken"] = "open"


@dataclass
class Outcomes:
    """What users got."""

    came: int = 0
    answered: int = 0
    streamed: int = 0
    tokens: int = 0
    compared: int = 0
    """answers of which it was known what they should be"""
    close: int = 0
    """of these: that went the other way at a close choice"""
    turned_away: int = 0
    """users who found too many others, and never asked"""
    refused: Counter[int] = field(default_factory=Counter)
    """by status: refusals that said to come again; each such request was answered later, or is among the
    lost"""
    broken: list[Break] = field(default_factory=list)
    open: set[Open] = field(default_factory=set)
    """tries that are under way"""
    asked_again: Counter[str] = field(default_factory=Counter)
    """requests that were answered only when they were asked again, by the first cause"""
    seconds: list[float] = field(default_factory=list)
    """from a request's coming to its whole answer"""
    streamed_seconds: list[float] = field(default_factory=list)
    """of streams, from the asking that was answered to its end"""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class _ComeAgain(Exception):
    """Refused; the pause that was asked for."""

    def __init__(self, status: int, seconds: float) -> None:
        super().__init__(status)
        self.status = status
        self.seconds = seconds


class _NotWhole(Exception):
    """An answer that is none; it is not asked for again."""


class Crowd:
    """Open arrivals at a rate, while `come` runs."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        library: Prompts,
        course: Sequence[Tide],
        per_second: float,
        dice: np.random.Generator,
    ) -> None:
        self.outcomes = Outcomes()
        self._http = http
        self._library = library
        self._course = course
        self._per_second = per_second
        self._dice = dice
        self._known: dict[int, Answer] = {}
        """what each prompt is answered with, since it was first asked plainly"""
        self._open = 0

    async def come(self, seconds: float) -> None:
        """For so long; returns when the last one is answered."""
        loop = asyncio.get_running_loop()
        began = now = loop.time()
        async with asyncio.TaskGroup() as users:
            while now - began < seconds:
                self.outcomes.came += 1
                if self._open < MOST_OPEN:
                    prompt = self._prompt(now - began)
                    users.create_task(
                        self._ask(prompt, bool(self._dice.integers(2))), name=f"asks prompt {prompt.number}"
                    )
                else:
                    self.outcomes.turned_away += 1
                now += float(self._dice.exponential(1.0 / self._per_second))
                await asyncio.sleep(now - loop.time())

    async def throng(self, users: int, seconds: float, phase: float) -> None:
        """Be quiet for a phase, then ask one thing after another for as long, by turns. Every second request
        is streamed."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def user(until: float, number: int) -> None:
            for asked in itertools.count(number):
                if loop.time() >= until:
                    return
                self.outcomes.came += 1
                await self._ask(self._prompt(loop.time() - began), stream=bool(asked % 2))

        while (begins := loop.time() + phase) < began + seconds:
            await asyncio.sleep(phase)
            until = min(begins + phase, began + seconds)
            async with asyncio.TaskGroup() as tasks:
                for number in range(users):
                    tasks.create_task(user(until, number), name=f"user {number} of a throng")

    def _prompt(self, seconds: float) -> Prompt:
        """Return what a user asks at a time after the beginning."""
        domain = int(self._dice.choice(len(self._library.domains), p=shares_at(self._course, seconds)))
        return self._library.any_of(domain, self._dice)

    async def _ask(self, prompt: Prompt, stream: bool) -> None:
        self._open += 1
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await self._insist(prompt, stream)
        except (_NotWhole, aiohttp.ClientError, TimeoutError) as error:
            self.outcomes.lost.append(
                f"prompt {prompt.number}, {'streamed' if stream else 'plain'}, asked at {began:.1f}: {error!r}"[
                    :500
                ]
            )
        else:
            self.outcomes.answered += 1
            self.outcomes.streamed += stream
            self.outcomes.tokens += len(answer.tokens)
            self.outcomes.seconds.append(asyncio.get_running_loop().time() - began)
            self._compare(prompt, answer)
        finally:
            self._open -= 1

    async def _insist(self, prompt: Prompt, stream: bool) -> Answer:
        """Ask until it is answered; only what may be repeated is."""
        clock = asyncio.get_running_loop().time
        first: Cause | None = None
        while True:
            attempt = Open(clock(), stream)
            self.outcomes.open.add(attempt)
            try:
                answer = await (self._streamed(prompt, attempt) if stream else self._plain(prompt, attempt))
            except _ComeAgain as refusal:
                attempt.outcome = "finished"
                self.outcomes.refused[refusal.status] += 1
                cause, pause = "refused", refusal.seconds
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                attempt.outcome = "broken"
                cause, pause = (
                    "not connected" if isinstance(error, aiohttp.ClientConnectorError) else "broken",
                    0.1,
                )
                self.outcomes.broken.append(Break(attempt.requested_at, clock(), attempt.tag, cause))
            except BaseException:
                attempt.outcome = "broken"
                raise
            else:
                attempt.outcome = "finished"
                if first is not None:
                    self.outcomes.asked_again[first] += 1
                if stream:
                    self.outcomes.streamed_seconds.append(clock() - attempt.requested_at)
                return answer
            finally:
                self.outcomes.open.discard(attempt)
            first = first or cause
            await asyncio.sleep(pause)

    async def _plain(self, prompt: Prompt, attempt: Open) -> Answer:
        more = {} if self._library.expected(prompt) else {"logprobs": 2}
        async with self._http.post("/v1/completions", json={**_body(prompt), **more}) as response:
            attempt.tag = _tag(response)
            await _must_be_good(response)
            choice: dict[str, Any] = (await response.json())["choices"][0]
        return _whole(prompt, choice["token_ids"], margins(choice) if more else [], choice["finish_reason"])

    async def _streamed(self, prompt: Prompt, attempt: Open) -> Answer:
        tokens: list[int] = []
        finish, ended = None, False
        async with self._http.post("/v1/completions", json={**_body(prompt), "stream": True}) as response:
            attempt.tag = _tag(response)
            await _must_be_good(response)
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    ended = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise _NotWhole(f"after {len(tokens)} tokens: {chunk['error']}")
                    for choice in chunk["choices"]:
                        tokens += choice.get("token_ids") or []
                        finish = choice["finish_reason"] or finish
                    attempt.tokens = len(tokens)
        if not ended:
            raise aiohttp.ClientPayloadError(f"a stream ended after {len(tokens)} tokens without [DONE]")
        return _whole(prompt, tokens, [], finish)

    def _compare(self, prompt: Prompt, answer: Answer) -> None:
        expected = self._library.expected(prompt)
        if expected is not None:
            self.outcomes.compared += 1
            apart = next(
                (
                    at
                    for at, pair in enumerate(zip(expected, answer.tokens, strict=True))
                    if pair[0] != pair[1]
                ),
                None,
            )
            if apart is not None:
                self.outcomes.wrong.append(
                    f"prompt {prompt.number}, token {apart} of {prompt.tokens}: {answer.tokens[apart]}, not"
                    f" {expected[apart]}"
                )
            return
        known = self._known.get(prompt.number)
        if known is None:
            if answer.margins:
                self._known[prompt.number] = answer
            return
        self.outcomes.compared += 1
        apart = next(
            (
                at
                for at, pair in enumerate(zip(known.tokens, answer.tokens, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        if apart is None:
            return
        if known.margins[apart] > MARGIN:
            difference = (
                f"prompt {prompt.number}, token {apart}: {answer.tokens[apart]}, not {known.tokens[apart]};"
                f" margin {known.margins[apart]:.4f}"
            )
            self.outcomes.wrong.append(difference)
        else:
            self.outcomes.close += 1


def _body(prompt: Prompt) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt.ids,
        "max_tokens": prompt.tokens,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }


async def _must_be_good(response: aiohttp.ClientResponse) -> None:
    if response.status in COME_AGAIN:
        await response.read()
        raise _ComeAgain(
            response.status, min(float(response.headers.get("retry-after", 1.0)), LONGEST_PAUSE_SECONDS)
        )
    if response.status != 200:
        raise _NotWhole(f"{response.status}: {await response.text()}")


def _tag(response: aiohttp.ClientResponse) -> str:
    """Of the router process that answers: the beginning of the ids of its decisions."""
    return response.headers.get("x-roost-decision-id", "")[:TAG_LENGTH]


def _whole(prompt: Prompt, tokens: list[int], margins: list[float], finish: str | None) -> Answer:
    if len(tokens) != prompt.tokens or finish != "length":
        raise _NotWhole(f"{len(tokens)} of {prompt.tokens} tokens, finish {finish!r}")
    return Answer(tokens, margins)
