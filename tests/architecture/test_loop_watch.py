"""The watch over the event loop sees what holds it up, names it, and leaves waiting, tests and threads
alone."""

import asyncio
import pkgutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import loop_watch
from tests.loop_watch import KNOWN, TIMES, LoopWatch, Offence, complaint

ROOT = Path(loop_watch.__file__).parent.parent
SOURCE = """
import time

class Busy:
    def spin(self, seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    async def answer(self, seconds):
        self.spin(seconds)
"""


def busy(module: str) -> object:
    """Code that counts as a module of ours."""
    names: dict[str, Callable[[], object]] = {}
    exec(compile(SOURCE, str(ROOT / f"{module}.py"), "exec"), names)
    return names["Busy"]()


async def test_a_callback_that_takes_long_is_named_by_the_code_that_took_it() -> None:
    watch, code = LoopWatch(), busy("router/invented")
    with watch.watching():
        await asyncio.create_task(code.answer(0.3))  # type: ignore[attr-defined]
    assert [offence.stack for offence in watch.offences] == [
        ("router.invented.Busy.answer", "router.invented.Busy.spin")
    ]
    assert watch.offences[0].seconds >= 0.3
    said = complaint(watch.offences, Counter())
    assert said is not None
    assert "router.invented.Busy.answer > router.invented.Busy.spin" in said


async def test_waiting_other_threads_and_a_tests_own_work_hold_nothing_up() -> None:
    watch, code = LoopWatch(), busy("router/invented")
    with watch.watching():
        await asyncio.to_thread(code.spin, 0.03)  # type: ignore[attr-defined]
        code.spin(0.03)  # type: ignore[attr-defined]
        asyncio.get_running_loop().call_soon(time.sleep, 0.03)
        await asyncio.sleep(0.05)
    assert watch.offences == []


async def test_what_is_known_is_let_be_and_what_is_short_counts_when_it_comes_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, code = LoopWatch(), busy("router/invented")
    with watch.watching():
        for _ in range(TIMES):
            await asyncio.create_task(code.answer(0.02))  # type: ignore[attr-defined]
    assert len(watch.offences) == TIMES
    session = Counter[str]()
    assert complaint(watch.offences[:-1], session) is None
    assert complaint(watch.offences[-1:], session) is not None
    monkeypatch.setitem(KNOWN, "router.invented.Busy.spin", "invented")
    assert complaint(watch.offences, session) is None


def test_what_no_look_fell_into_is_chance_until_it_comes_again() -> None:
    once = Offence(0.2, ("router.invented.Busy.answer",), was_seen=False)
    session = Counter[str]()
    assert [complaint([once], session) is None for _ in range(TIMES)] == [True] * (TIMES - 1) + [False]


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_exists(name: str) -> None:
    """So that the list shrinks with the code."""
    found = pkgutil.resolve_name(name)
    assert found.__qualname__ == name.removeprefix(found.__module__ + ".")
