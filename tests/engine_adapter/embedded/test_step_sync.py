"""Ranks keep step, sleep without polling, wake each other, and notice when one is gone."""

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.embedded.step_sync import (
    PeerLost,
    PeerTimeout,
    RankGroup,
    StepHeader,
    StepMismatch,
    StepSync,
    StepSyncError,
)
from fleet.placement import linear, with_rows

HERE = Path(__file__).parents[1]
FIELD = st.integers(-(2**62), 2**62)


def ranks_in_threads(directory, ranks, pool, **settings):
    return list(pool.map(lambda rank: RankGroup(directory, rank, ranks, **settings), range(ranks)))


@pytest.fixture
def pair(tmp_path):
    """Two ranks as threads of this process: (locksteps, pool)."""
    with ThreadPoolExecutor(2) as pool:
        groups = ranks_in_threads(tmp_path, 2, pool, step_timeout_s=20)
        steps = [StepSync(tmp_path, rank, group) for rank, group in enumerate(groups)]
        yield steps, pool
        for one in (*steps, *groups):
            one.close()


@settings(deadline=None)
@given(st.lists(FIELD, min_size=8, max_size=8))
def test_a_header_survives_the_wire(fields):
    header = StepHeader(*fields)
    wire = torch.tensor(header, dtype=torch.int64)
    assert wire.shape == (8,)
    assert StepHeader(*wire.tolist()) == header


@pytest.mark.parametrize("notes", [(b"", b""), (b"plan", b""), (b"", b"x" * 70_000), (b"a" * 3, b"b" * 5)])
def test_every_rank_hears_every_note_in_rank_order(pair, notes):
    steps, pool = pair
    sizes = [len(note) for note in notes]
    assert list(pool.map(StepSync.share, steps, notes, [sizes, sizes])) == [list(notes)] * 2


def test_numbers_are_gathered_in_rank_order(pair):
    steps, pool = pair
    assert list(pool.map(StepSync.gather, steps, [[1, 2], [3, 4]])) == [[[1, 2], [3, 4]]] * 2
    assert list(pool.map(StepSync.gather, steps, [[], []])) == [[[], []]] * 2


def test_every_rank_hears_every_header_in_rank_order(pair):
    steps, pool = pair
    headers = [StepHeader(step=4, tokens=7 + rank, epoch_ready=rank) for rank in range(2)]
    assert list(pool.map(StepSync.exchange, steps, headers)) == [tuple(headers)] * 2


def test_ranks_at_different_steps_notice(pair):
    steps, pool = pair
    found = [pool.submit(one.exchange, StepHeader(step=3 + one.rank)) for one in steps]
    for one in found:
        with pytest.raises(StepMismatch, match=r"the ranks at \[3, 4\]"):
            one.result()


def test_a_rank_that_is_nudged_wakes_all(pair):
    steps, pool = pair
    asleep = [pool.submit(one.sleep, 5) for one in steps]
    assert not wait(asleep, timeout=0.1).done
    steps[1].nudge()
    assert not wait(asleep, timeout=10).not_done


def test_a_nudge_before_the_sleep_counts_once(pair):
    steps, pool = pair
    for _ in range(1000):
        steps[0].nudge()
    steps[0].sleep(5)
    pool.submit(steps[1].sleep, 5).result(timeout=10)
    asleep = pool.submit(steps[0].sleep, 6)
    assert not wait([asleep], timeout=0.1).done
    steps[0].nudge()
    asleep.result(timeout=10)


def test_a_stale_wake_is_ignored(pair):
    steps, pool = pair
    for one in steps:
        one.nudge()
    for one in steps:
        one.sleep(5)  # both woke both: a wake for step 5 is left in each socket
    asleep = [pool.submit(one.sleep, 6) for one in steps]
    assert not wait(asleep, timeout=0.2).done
    steps[0].nudge()
    assert not wait(asleep, timeout=10).not_done


@pytest.mark.slow
def test_a_thousand_sleeps_with_both_ranks_nudged_at_random_lose_no_wake(pair):
    steps, pool = pair

    def live(one):
        for step in range(1000):
            if step % 3 != one.rank:
                one.nudge()
            one.sleep(step)
            one.exchange(StepHeader(step=step))

    for done in [pool.submit(live, one) for one in steps]:
        done.result(timeout=60)


def test_ranks_that_are_both_nudged_every_time_do_not_fill_each_others_sockets(pair):
    steps, pool = pair

    def live(one):
        for step in range(200):
            one.nudge()
            one.sleep(step)
            one.exchange(StepHeader(step=step))

    for done in [pool.submit(live, one) for one in steps]:
        done.result(timeout=60)


def test_ranks_that_serve_different_epochs_notice(pair):
    steps, pool = pair
    for one in [pool.submit(one.exchange, StepHeader(step=3, epoch_served=one.rank)) for one in steps]:
        with pytest.raises(StepMismatch, match=r"serves epoch [01], the ranks \[0, 1\]"):
            one.result(timeout=10)


def test_ranks_whose_layers_of_one_epoch_differ_in_form_notice_before_they_serve_it(pair):
    steps, pool = pair
    whole = linear(layers=2, experts=4, ranks=2)
    placements = [with_rows(whole, {layer: None}, epoch=1) for layer in range(2)]
    before = [StepHeader(step=3, digest=whole.digest) for _ in steps]
    assert list(pool.map(StepSync.exchange, steps, before)) == [tuple(before)] * 2
    # The second rank gets ready one step later.
    ready = [StepHeader(step=4, epoch_ready=1, digest=placements[0].digest), before[1]._replace(step=4)]
    assert list(pool.map(StepSync.exchange, steps, ready)) == [tuple(ready)] * 2
    both = [StepHeader(step=5, epoch_ready=1, digest=one.digest) for one in placements]
    for found in [pool.submit(*call) for call in zip([one.exchange for one in steps], both, strict=True)]:
        with pytest.raises(StepMismatch, match=r"ranks 0 and 1 have different placements of epoch 1"):
            found.result(timeout=10)


def test_every_rank_names_the_first_two_that_differ(tmp_path):
    digests = [7, 7, 8]
    with ThreadPoolExecutor(3) as pool:
        groups = ranks_in_threads(tmp_path, 3, pool, step_timeout_s=20)
        steps = [StepSync(tmp_path, rank, group) for rank, group in enumerate(groups)]
        found = [
            pool.submit(one.exchange, StepHeader(step=1, digest=digest))
            for one, digest in zip(steps, digests, strict=True)
        ]
        for one in found:
            with pytest.raises(StepMismatch, match=r"ranks 0 and 2 .* digests 7 and 8"):
                one.result(timeout=10)
        for one in (*steps, *groups):
            one.close()


def test_sleeping_uses_no_processor(tmp_path):
    alone = StepSync(tmp_path)
    used = []

    def sleep():
        begin = time.thread_time()
        alone.sleep(0)
        used.append(time.thread_time() - begin)

    thread = threading.Thread(target=sleep)
    thread.start()
    thread.join(timeout=1.2)
    assert thread.is_alive()
    alone.nudge()
    thread.join(timeout=10)
    assert used[0] < 0.01
    alone.close()


def test_an_engine_of_one_rank_exchanges_with_itself(tmp_path):
    alone = StepSync(tmp_path)
    header = StepHeader(step=1, tokens=3)
    assert alone.exchange(header) == (header,)
    alone.close()


def test_a_sleeping_rank_notices_that_a_peer_is_gone(pair):
    steps, pool = pair
    asleep = pool.submit(steps[0].sleep, 5)
    steps[1].close()
    with pytest.raises(PeerLost, match=r"rank1\.wake"):
        asleep.result(timeout=10)


def test_a_rank_that_left_is_lost_to_the_others(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        groups = ranks_in_threads(tmp_path, 2, pool, step_timeout_s=20)
    groups[1].close()
    del groups[1]
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        groups[0].all_gather(torch.zeros(8, dtype=torch.int64))
    assert time.monotonic() - begin < 5
    groups[0].close()


def test_a_rank_alone_gives_up_waiting_for_the_others(tmp_path):
    with pytest.raises(PeerTimeout, match="join of 2 ranks"):
        RankGroup(tmp_path, 0, 2, join_timeout_s=0.3)


def test_a_second_start_in_the_same_directory_is_refused(tmp_path):
    first = StepSync(tmp_path)
    with pytest.raises(StepSyncError, match="its own run directory"):
        StepSync(tmp_path)
    first.close()


def test_a_run_directory_too_long_for_a_socket_is_named(tmp_path):
    with pytest.raises(StepSyncError, match="shorter run directory"):
        StepSync(tmp_path / ("x" * 120))


@pytest.mark.parametrize(
    ("number", "error", "shortest", "longest"),
    [(signal.SIGKILL, "PeerLost", 0, 1.0), (signal.SIGSTOP, "PeerTimeout", 1.0, 4.0)],
)
def test_a_killed_peer_is_noticed_at_once_and_a_frozen_one_within_the_step_time_out(
    tmp_path, number, error, shortest, longest
):
    (tmp_path / "job.json").write_text(json.dumps({"do": "exchange", "ranks": 2, "step_timeout_s": 1.5}))
    command = [sys.executable, str(HERE / "rank_process.py"), str(tmp_path / "job.json")]
    root = HERE.parents[1]
    survivor, victim = (
        subprocess.Popen([*command, str(rank)], cwd=root, env={"PYTHONPATH": str(root)}) for rank in range(2)
    )
    try:
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"{rank}.stepping").exists() for rank in range(2)):
            assert survivor.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        victim.send_signal(number)
        assert survivor.wait(timeout=20) == 0
    finally:
        for process in (survivor, victim):
            process.kill()
            process.wait()
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["error"] == error
    assert shortest <= found["seconds"] < longest


def test_emulated_delays_are_waited_for_in_sum_however_short_and_however_late_a_timer_is(
    tmp_path, monkeypatch
):
    with ThreadPoolExecutor(1) as pool:
        group = ranks_in_threads(tmp_path, 1, pool)[0]
    now, late = 0.0, 7e-5

    def sleep(seconds):
        nonlocal now
        now += seconds + late

    monkeypatch.setattr("engine_adapter.embedded.step_sync.time.sleep", sleep)
    monkeypatch.setattr("engine_adapter.embedded.step_sync.time.perf_counter", lambda: now)
    for at in range(1000):
        group.wait(3e-5)
        assert abs(now - (at + 1) * 3e-5) <= 2e-4 + late
    assert group.seconds == pytest.approx(now)
    group.close()
