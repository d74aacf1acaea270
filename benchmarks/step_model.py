"""Step times of a real engine beside those that the time model predicts, in three layouts.

Two ranks serve the demo model under expert parallelism (EP), with the experts of every layer sharded
(EXPERTS_TP), and with attention sharded too (TP). Requests reach the engine without HTTP. Steps are grouped
by what they compute: a number of decoding sequences with short or long contexts, or prompt tokens of one rank
or of all ranks. The prediction of a step is `fleet.timing.step_seconds`, with the speeds that the engine
states at its join, and the tokens, KV blocks and experts of the step. All groups alternate in every round.

Every start of an engine calibrates anew. A group's error in one start is the median over its steps, and the
error that is judged is the median over the starts: an error of the model is in all of them, that of one
calibration or of a slower minute of the machine is not. How much the errors of a group differ between the
starts, and the medians of its steps between the rounds, shows what this machine can tell.

    python -m benchmarks.step_model --quick
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.rig.report import AsJson, Check, Quick, Report, Target
from benchmarks.rig.step_times.timed_engine import EngineStep, TimedEngine, timed_engine
from benchmarks.rig.turns.random_model import write_model
from deploy.demo_model import checkpoint_path
from engine_adapter.embedded.checkpoint import read_config
from fleet.experts import ModelShape
from fleet.layout import ATTENTION_NAMES
from fleet.placement import Placement, linear, with_attention, with_rows
from fleet.timing import EngineSpeed

RANKS = 2
BATCHES = (1, 4, 8, 16, 32)
"""decoding sequences of the engine"""
SHORT, LONG = 32, 1024
"""tokens of the prompts of decoding sequences"""
PROMPTS = (64, 128, 256, 512, 1024)
NEW_TOKENS = 24
KV_BLOCKS = 2048
RANDOM = ModelShape(layers=4, experts=32, top_k=4, hidden=512, expert_intermediate=256)
"""with --random: longer steps, of larger matrices"""
PROMPT_TIMES = 6
"""how often a round serves prompts, which have a step or two each time"""
FEWEST = 3
"""steps of a group that count"""
ERROR = 0.15
FASTEST = 0.1
"""share of the steps that counts on a busy machine"""


class Case(NamedTuple):
    """Requests of one kind, by the name of their group of steps."""

    name: str
    sequences: int
    """of the engine"""
    prompt: int
    new_tokens: int
    alone: bool = False
    """rank 0 has all of them"""

    def prompts(self, dice: np.random.Generator, tensor_parallel: bool) -> list[list[list[int]]]:
        """Return new random prompts of each rank. Under tensor-parallel attention, rank 0 takes all of
        them."""
        made = [dice.integers(32, 127, self.prompt).tolist() for _ in range(self.sequences)]
        if tensor_parallel or self.alone:
            return [made, *[[] for _ in range(RANKS - 1)]]
        return [made[rank::RANKS] for rank in range(RANKS)]

    @property
    def times(self) -> int:
        """How often a round serves it."""
        return 1 if self.new_tokens > 1 else PROMPT_TIMES

    def has(self, step: EngineStep) -> bool:
        """Return True for a step of this kind: all sequences decode, or every rank that got a prompt computes
        a chunk of it, and nothing else."""
        tokens = [one.prefill_tokens for one in step.working]
        sequences = [one.sequences for one in step.working]
        if self.new_tokens > 1:
            return not any(tokens) and sum(sequences) == self.sequences
        return not any(sequences) and sum(tokens) > 0


def cases(prompts: Sequence[int], batches: Sequence[int]) -> Iterator[Case]:
    """Yield the cases of data-parallel attention. Under tensor-parallel attention every prompt is computed by
    all ranks, so that `alone` makes no difference."""
    for kind, prompt in (("short", SHORT), ("long", LONG)):
        for batch in batches:
            yield Case(f"decode {batch}, {kind}", batch, prompt, NEW_TOKENS)
    for prompt in prompts:
        yield Case(f"prompt {prompt}", 1, prompt, 1, alone=True)
        yield Case(f"prompts {prompt}", RANKS, prompt, 1)


class LayoutCase(NamedTuple):
    name: str
    placement: Placement

    @property
    def tensor_parallel(self) -> bool:
        return self.placement.attention == "tp"


def layouts(shape: ModelShape) -> list[LayoutCase]:
    """Return the layouts to measure."""
    whole = linear(layers=shape.layers, experts=shape.experts, ranks=RANKS)
    sharded = with_rows(whole, dict.fromkeys(range(shape.layers)), epoch=0)
    return [
        LayoutCase("EP", whole),
        LayoutCase("EXPERTS_TP", sharded),
        LayoutCase("TP", with_attention(sharded, "tp", epoch=0)),
    ]


class Measured(NamedTuple):
    """Steps of a group in one start of the engine: seconds and predicted seconds, float64 [steps] each."""

    layout: LayoutCase
    case: str
    seconds: NDArray[np.float64]
    predicted: NDArray[np.float64]
    spread: float
    """`spread` of its rounds."""

    def error(self, fastest: float) -> float:
        """Return the relative error of the prediction, at this quantile of the steps from the fastest."""
        return float(np.quantile(self.predicted / self.seconds, 1.0 - fastest)) - 1.0


class Group(NamedTuple):
    """A group of steps over all starts of the engine."""

    starts: Sequence[Measured]

    def errors(self, fastest: float) -> NDArray[np.float64]:
        """Return `Measured.error` of every start, float64 [starts]."""
        return np.array([one.error(fastest) for one in self.starts])

    def row(self, fastest: float) -> tuple[str | float, ...]:
        """Return the row of the report: times in ms, the rest in percent, as medians over the starts."""
        times = [(*np.quantile(one.seconds, [0.5, FASTEST]), np.median(one.predicted)) for one in self.starts]
        errors, first = self.errors(fastest), self.starts[0]
        return (
            f"{first.layout.name}, {first.case}",
            sum(len(one.seconds) for one in self.starts),
            *(1e3 * np.median(times, axis=0)).tolist(),
            100 * float(np.median(errors)),
            100 * float(errors.min()),
            100 * float(errors.max()),
            100 * float(np.median([one.spread for one in self.starts])),
        )


def spread(rounds: Sequence[Sequence[float]]) -> float:
    """Return the difference between the highest and the lowest median of the rounds' steps, over the median
    of all. 0 if no two rounds have steps."""
    medians = [float(np.median(one)) for one in rounds if one]
    return (max(medians) - min(medians)) / float(np.median(np.concatenate(rounds))) if medians else 0.0


def steps_by_case(
    engine: TimedEngine, layout: LayoutCase, every: Sequence[Case], rounds: int
) -> dict[str, list[list[EngineStep]]]:
    """Serve all cases in every round, in another order each time. Return the steps of each round. The first
    round warms the engine and does not count."""
    dice = np.random.default_rng(1)
    begins: list[tuple[int, Case, int]] = []
    for number in range(rounds + 1):
        order = dice.permutation(np.repeat(np.arange(len(every)), [case.times for case in every]))
        for at in order.tolist():
            case = every[at]
            first = engine.serve(case.prompts(dice, layout.tensor_parallel), case.new_tokens)
            begins.append((first, case, number))
    steps = engine.steps()
    found: dict[str, list[list[EngineStep]]] = {case.name: [[] for _ in range(rounds)] for case in every}
    ends = [first for first, _, _ in begins[1:]] + [len(steps)]
    for (first, case, number), end in zip(begins, ends, strict=True):
        if number:
            found[case.name][number - 1] += [step for step in steps[first:end] if case.has(step)]
    return found


def measure(
    checkpoint: Path, shape: ModelShape, layout: LayoutCase, every: Sequence[Case], rounds: int
) -> tuple[list[Measured], EngineSpeed]:
    """Measure one layout."""
    with timed_engine(checkpoint, layout.placement, KV_BLOCKS) as engine:
        speed = engine.tp_speed if layout.tensor_parallel else engine.speed
        assert speed is not None
        groups = steps_by_case(engine, layout, every, rounds)
    found = []
    for name, by_round in groups.items():
        steps = [one for each in by_round for one in each]
        if len(steps) >= FEWEST:
            seconds = np.array([one.seconds for one in steps])
            predicted = np.array([one.predicted(speed, shape, layout.placement) for one in steps])
            differ = spread([[one.seconds for one in each] for each in by_round])
            found.append(Measured(layout, name, seconds, predicted, differ))
    return found, speed


@contextmanager
def model(random: bool) -> Iterator[tuple[Path, ModelShape]]:
    """Yield the checkpoint and its shape."""
    if not random:
        folder = Path(checkpoint_path())
        yield folder, read_config(folder).shape("float32")
        return
    with tempfile.TemporaryDirectory(prefix="random-") as name:
        folder = write_model(Path(name), RANDOM)
        yield folder, read_config(folder).shape("float32")


def main(
    quick: bool = Quick,
    as_json: bool = AsJson,
    check: bool = Check,
    starts: int = typer.Option(None, min=1, help="starts of the engine, each with its own calibration"),
    rounds: int = typer.Option(None, min=1, help="rounds of all cases in each start"),
    random: bool = typer.Option(False, "--random", help="a larger model of random weights"),
    busy: bool = typer.Option(False, "--busy", help="judge the fastest tenth of each group's steps"),
) -> None:
    """Compare measured and predicted step times."""
    every = list(cases(PROMPTS[1::2] if quick else PROMPTS, BATCHES[::2] if quick else BATCHES))
    starts, rounds = starts or (1 if quick else 5), rounds or (1 if quick else 2)
    columns = ["layout, steps of", "steps", "median ms", "fastest tenth ms", "predicted ms", "error %"]
    report = Report("step times", [*columns, "lowest %", "highest %", "rounds differ by %"])
    groups: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    with model(random) as (checkpoint, shape):
        for start in range(starts):
            for layout in layouts(shape):
                found, speed = measure(checkpoint, shape, layout, every, rounds)
                for one in found:
                    groups[layout.name, one.case].append(one)
                stated = {name: float(f"{value:.3g}") for name, value in msgspec.to_builtins(speed).items()}
                report.notes.append(f"{layout.name}, start {start + 1}, speed in seconds: {stated}")
    fastest = FASTEST if busy else 0.5
    worst: dict[str, float] = defaultdict(float)
    for measured in groups.values():
        group, served = Group(measured), measured[0].layout.placement.attention
        report.add(*group.row(fastest))
        worst[served] = max(worst[served], abs(float(np.median(group.errors(fastest)))))
    for attention, error in worst.items():
        name = f"worst error under {ATTENTION_NAMES['tp' if attention == 'tp' else 'dp']} attention"
        report.targets.append(Target(name, error, ERROR, at_least=False, unit=""))
    report.targets.append(
        Target("worst error of both attentions", max(worst.values()), ERROR, at_least=False, unit="")
    )
    report.finish(as_json=as_json, check=check)


if __name__ == "__main__":
    typer.run(main)
