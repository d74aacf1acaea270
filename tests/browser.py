"""The dashboard in a real browser, as its tests see it."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.rig.live.browser import missing, open_browser

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Locator, Page, Request

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing())
PAGES = ("fleet", "requests", "experts", "loop", "layouts")
PATIENCE_MS = 15_000.0
_ROWS = """table => {
    const titles = [...table.tHead.querySelectorAll('th')].map(head => head.textContent);
    const cells = row => [...row.children].filter(cell => !cell.classList.contains('opener'));
    return [...table.tBodies[0].children].filter(row => row.querySelector(':scope > th')).map(row =>
        Object.fromEntries(cells(row).map((cell, at) => [titles[at], cell.textContent])));
}"""


@dataclass
class Dashboard:
    """One tab with the dashboard of a router."""

    page: "Page"
    url: str

    async def open(self, *place: str) -> None:
        """Load the page anew at a place, such as ("requests", ID), and wait for its heading."""
        await self.page.goto("about:blank")
        await self.page.goto(f"{self.url}/dashboard#/{'/'.join(place)}")
        await self.page.wait_for_selector("h1")

    def table(self, caption: str) -> "Locator":
        """Table of which the caption begins so."""
        return self.page.locator(f"table:has(> caption:text('{caption}'))").first

    async def rows(self, caption: str) -> list[dict[str, str]]:
        """Rows of a table as texts by column. Rows with details below are without these."""
        rows: list[dict[str, str]] = await self.table(caption).evaluate(_ROWS)
        return rows

    async def tiles(self) -> dict[str, tuple[str, str]]:
        """By label: the figure and the note below it."""
        found: dict[str, tuple[str, str]] = await self.page.evaluate(
            "() => Object.fromEntries([...document.querySelectorAll('.tile')].map("
            "tile => [tile.querySelector('dt').textContent,"
            " [...tile.querySelectorAll('dd')].map(one => one.textContent)]))"
        )
        return {label: (value[0], value[1]) for label, value in found.items()}

    async def verdict(self) -> str:
        """Sentence at the top of a page."""
        return await self.page.locator(".verdict").first.inner_text()

    async def until(self, fact: Callable[[], Awaitable[Any]], what: str, seconds: float = 20.0) -> Any:
        """Look until the page shows something, which comes with one of the next events, and return it."""
        for _ in range(int(seconds / 0.1)):
            if found := await fact():
                return found
            await self.page.wait_for_timeout(100)
        raise AssertionError(
            f"not within {seconds} s: {what}; the page shows:\n{await self.page.inner_text('main')}"
        )


@dataclass
class WatchedBrowser:
    """A browser whose tabs are watched for faults."""

    browser: "Browser"
    faults: list[str] = field(default_factory=list)
    """errors and warnings of the console, uncaught exceptions, and requests to other servers"""

    @contextlib.asynccontextmanager
    async def dashboard(self, url: str, *, refused: bool = False, **context: Any) -> AsyncIterator[Dashboard]:
        """Open an empty tab. refused: answers 401 and 403, which browsers write to the console, are expected.
        context: options of a browser context, e.g. `color_scheme`.
        """

        def heard(message: "ConsoleMessage") -> None:
            expected = refused and "the server responded with a status of 40" in message.text
            if message.type in ("error", "warning") and not expected:
                self.faults.append(f"{message.type}: {message.text}")

        def requested(request: "Request") -> None:
            if not request.url.startswith((url, "about:")):
                self.faults.append(f"a request to {request.url}")

        tab = await self.browser.new_context(**{"viewport": {"width": 1360, "height": 900}, **context})
        page = await tab.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", heard)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("request", requested)
        try:
            yield Dashboard(page, url)
        finally:
            await tab.close()


@contextlib.asynccontextmanager
async def faultless_browser() -> AsyncIterator[WatchedBrowser]:
    """Run a browser; faults of its tabs fail the test."""
    async with open_browser() as browser:
        watched = WatchedBrowser(browser)
        yield watched
    assert not watched.faults


async def accessibility_faults(page: "Page") -> list[str]:
    """Return the faults that axe-core finds in a page, of any gravity, with their elements."""
    from axe_playwright_python.async_playwright import Axe

    found = (await Axe().run(page)).response["violations"]
    return [
        f"{fault['impact']}: {fault['id']}: {fault['help']}: {[node['html'][:120] for node in fault['nodes']]}"
        for fault in found
    ]
