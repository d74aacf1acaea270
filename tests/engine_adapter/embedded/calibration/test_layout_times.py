"""Times of a layout from measured steps."""

import numpy as np
import pytest

from engine_adapter.embedded.calibration.cells import Batches, PromptCell
from engine_adapter.embedded.calibration.hardware import hardware_digest, processor
from engine_adapter.embedded.calibration.layout_times import noise, times_of_layout
from engine_adapter.embedded.calibration.measurement import MeasuredSteps
from engine_adapter.embedded.calibration.speed_fit import StepLoad

LOAD = StepLoad(*[0.0] * len(StepLoad._fields))


def test_a_layout_states_the_median_of_each_kind_of_step() -> None:
    every = Batches((1, 8), (64, 512))
    steps = [
        MeasuredSteps(cell, LOAD, surplus=0.5, seconds=[9.0, at + 1.0, 0.5, 8.0, at + 1.0])
        for at, cell in enumerate(every.cells)
    ]
    prompt = MeasuredSteps(PromptCell(256), LOAD, surplus=7.0, seconds=[0.5, 3.0, 0.25, 1.0, 2.0])
    found = times_of_layout("experts-tp", every, [*steps, prompt], 512)
    assert (found.layout, found.sequences, found.contexts) == ("experts-tp", (1, 8), (64, 512))
    assert found.seconds == ((1.0, 2.0), (3.0, 4.0))
    assert found.prefill_token == 1 / 512
    assert found.surplus == 4 * 0.5 / (1 + 8 + 1 + 8)


@pytest.mark.parametrize("repeats", [5, 15])
def test_the_noise_is_the_standard_error_of_such_a_median(repeats: int) -> None:
    dice = np.random.default_rng(repeats)
    steps = dice.normal(3.0, 0.06, (400, repeats))
    expected = np.median(steps, axis=1).std() / 3.0
    assert noise(steps.tolist()) == pytest.approx(expected, rel=0.2)


def test_single_steps_that_were_delayed_hardly_count_as_noise() -> None:
    dice = np.random.default_rng(0)
    steps = dice.normal(1.0, 0.01, (30, 7))
    delayed = steps.copy()
    delayed[::5, 0] = 9.0
    assert noise(delayed.tolist()) < 1.5 * noise(steps.tolist())


def test_the_noise_of_single_steps_is_not_known() -> None:
    assert noise([[1.0], [2.0]]) == 0.1


def test_a_machine_is_known_by_its_processor_its_ranks_and_the_type_of_its_weights() -> None:
    assert processor("processor\t: 0\nmodel name\t: Quick 9\nmodel name\t: Slow 1\n") == "Quick 9"
    assert processor("") == ""
    digests = {hardware_digest(ranks, dtype) for ranks in (1, 2) for dtype in ("float32", "bfloat16")}
    assert len(digests) == 4
    assert hardware_digest(2, "float32") in digests
    assert all(len(one) == 16 for one in digests)
