"""What a recorded vLLM of two ranks says of its load and its caches."""

import pytest

from engine_adapter.vllm.load import rank_load
from engine_adapter.vllm.metrics_text import MetricsReading
from tests.engine_adapter.vllm.recorded_server import RECORDING

IDLE, LOADED = MetricsReading(RECORDING["metrics"]), MetricsReading(RECORDING["loaded"])


def test_ranks_and_their_caches_are_found() -> None:
    assert IDLE.ranks == (0, 1)
    assert [IDLE.block_size(rank) for rank in IDLE.ranks] == [32, 32]
    # --num-gpu-blocks-override 24; the server itself says num_gpu_blocks="48", the sum of its ranks
    assert [IDLE.kv_blocks(rank) for rank in IDLE.ranks] == [24, 24]


def test_the_sum_of_blocks_is_divided_where_nothing_else_is_reported() -> None:
    older = MetricsReading(
        "".join(
            f'vllm:num_requests_running{{engine="{rank}"}} 0.0\n'
            f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="100"}} 1.0\n'
            for rank in range(2)
        )
    )
    assert [older.kv_blocks(rank) for rank in older.ranks] == [50, 50]


def test_load_is_told_per_rank() -> None:
    idle, busy = LOADED.load(0), LOADED.load(1)
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)
    assert (busy.running, busy.waiting) == (2, 4)
    load = rank_load(busy, IDLE.load(1), kv_blocks=24, cached_blocks=23)
    assert (load.running, load.waiting, load.used_blocks) == (2, 4, 23)
    assert load.decode_blocks == 21  # of the 23 that vLLM uses, 20 are held: .87 of 24 here
    assert load.prefill_tokens == 4 * 1098 // 12  # the mean prefill of the 12 requests that had ended
    assert load.step_seconds == pytest.approx(3.440874 / 726, rel=1e-6)


def test_a_rank_without_new_tokens_has_no_step_time() -> None:
    now = LOADED.load(1)
    assert rank_load(now, now, kv_blocks=24, cached_blocks=0).step_seconds is None
    assert rank_load(now, None, kv_blocks=24, cached_blocks=0).step_seconds is None


def test_the_start_is_that_of_the_process_or_of_the_oldest_counter() -> None:
    assert IDLE.started == LOADED.started is not None
    without = "".join(
        f"{line}\n" for line in RECORDING["metrics"].splitlines() if not line.startswith("process_start")
    )
    started = MetricsReading(without).started
    assert started is not None
    assert 0 < started - IDLE.started < 60  # the counters are made when the engine is up
    assert MetricsReading("").started is None


@pytest.mark.parametrize(
    "line", ["vllm:num_requests_running{engine=", "vllm:x{} y z", "process_start_time_seconds"]
)
def test_text_that_is_no_metrics_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="no Prometheus sample"):
        MetricsReading(line)


def test_labels_may_hold_any_text() -> None:
    reading = MetricsReading(r'vllm:num_requests_running{model_name="a,\"b}",engine="3"} 7.0')
    assert reading.ranks == (3,)
    assert reading.load(3).running == 7
