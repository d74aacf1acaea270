"""Chromium of this machine, for benchmarks and tests of the dashboard: headless, no traffic of its own."""

import contextlib
import importlib.util
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.async_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """Return the path of a Chromium; None: there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def missing() -> str:
    """Return what is missing for a browser, and how to get it; "": nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed (make venv)"
    if chromium() is None:
        return "there is no Chromium on this machine (make browser, or Debian: apt install chromium)"
    return ""


@contextlib.asynccontextmanager
async def open_browser() -> AsyncIterator["Browser"]:
    """Run a Chromium without a window and with an empty profile. `missing` must be empty."""
    from playwright.async_api import async_playwright

    async with async_playwright() as browsers:
        browser = await browsers.chromium.launch(executable_path=chromium(), args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()
