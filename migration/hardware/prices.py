"""Durations of decode steps, priced by published or by own timings. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import msgspec

from fleet.layout_times import LayoutName
from migration.hardware.models import MODELS, ConsideredModel
from migration.hardware.price_fit import Fitted, fitted, priced
from migration.hardware.step_form import PARTS, PartName, Units, step_units

Prices = tuple[float, float, float, float]


class StepPrediction(Protocol):
    """Predicted decode steps of one model, machine, number of ranks and kernel stack."""

    @property
    def kernels(self) -> str:
        """Kernels that were timed."""
        ...

    @property
    def errors(self) -> Mapping[LayoutName, float]:
        """Relative error of the form, root mean square, of each layout that was timed."""
        ...

    @property
    def sequences(self) -> tuple[int, int]:
        """Fewest and most sequences that were timed."""
        ...

    @property
    def contexts(self) -> tuple[int, int]:
        """Shortest and longest context that was timed."""
        ...

    def seconds(self, layout: LayoutName, sequences: int, context: int) -> float:
        """Return the duration of a step."""
        ...


class PublishedFit(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of one model's parts on one machine, number of ranks and kernel stack."""

    hardware: str
    kernels: str
    model: str
    ranks: int
    prices: dict[LayoutName, dict[str, Prices]]
    """of ep and tp: a part, or `skewed` for experts under skewed routing, -> prices of `Units`"""
    errors: dict[LayoutName, float]
    """relative error of a whole step, root mean square, beside the timings it was fitted to"""
    skewed_errors: dict[LayoutName, float]


class PublishedPrices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices fitted to published kernel timings, with their source."""

    source: str
    date: str
    kernels: dict[str, str]
    """name -> title with version"""
    collectives: str
    sequences: tuple[int, int]
    contexts: tuple[int, int]
    fits: tuple[PublishedFit, ...]

    @classmethod
    def decode(cls, text: bytes) -> "PublishedPrices":
        """Read the file of prices."""
        return msgspec.json.decode(text, type=cls)

    def find(
        self, model: ConsideredModel, hardware: str, ranks: int, kernels: str, *, skewed: bool = False
    ) -> "PublishedSteps | None":
        """Return the steps of a model; None without a published figure for these dimensions.

        skewed: tokens choose experts by a power law of exponent 1.2, as the timings have it.
        """
        named = next((one.name for one in MODELS.values() if replace(model, name=one.name) == one), None)
        for fit in self.fits:
            if (fit.model, fit.hardware, fit.ranks, fit.kernels) == (named, hardware, ranks, kernels):
                return PublishedSteps(self, fit, model, skewed=skewed)
        return None


class PublishedSteps:
    """Steps by published prices: of the kernels alone."""

    def __init__(
        self, published: PublishedPrices, fit: PublishedFit, model: ConsideredModel, *, skewed: bool
    ) -> None:
        self.kernels = published.kernels[fit.kernels]
        self.errors = fit.skewed_errors if skewed else fit.errors
        self.sequences, self.contexts = published.sequences, published.contexts
        self._fit, self._model, self._experts = fit, model, "skewed" if skewed else "experts"

    def parts(self, layout: LayoutName, sequences: int, context: int) -> dict[str, float]:
        """Return the seconds of each part of a step. EXPERTS_TP has the attention of EP and the experts of
        TP."""
        units = step_units(self._model, layout, self._fit.ranks, sequences, context)
        prices, experts = self._fit.prices["tp" if layout == "tp" else "ep"], self._fit.prices
        of_experts = experts["ep" if layout == "ep" else "tp"][self._experts]
        return {
            part: priced(of_experts if part == "experts" else prices[part], units[part]) for part in PARTS
        }

    def seconds(self, layout: LayoutName, sequences: int, context: int) -> float:
        """Return the duration of a step: the sum of its parts."""
        return sum(self.parts(layout, sequences, context).values())


class OwnTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Measured decode steps of one layout and context, as `--kernels FILE` states them."""

    layout: LayoutName
    context: int
    sequences: tuple[int, ...]
    """of the engine"""
    milliseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"times of {self.layout} at context {self.context}"
        if not self.sequences or len(self.sequences) != len(self.milliseconds):
            raise ValueError(
                f"{where}: {len(self.sequences)} sequences and {len(self.milliseconds)} milliseconds; state"
                " as many of each, at least one"
            )
        bad = next((one for one in self.milliseconds if not 0 < one < 1e6), None)
        if bad is not None or min(self.sequences) < 1 or self.context < 1:
            raise ValueError(
                f"{where}: milliseconds must be above 0 and below 1e6, sequences and context at least 1; not"
                f" {list(self.milliseconds)}, {list(self.sequences)}"
            )


class OwnTimings(msgspec.Struct, frozen=True, kw_only=True):
    """A file of own timings."""

    times: tuple[OwnTimes, ...]

    @classmethod
    def decode(cls, text: bytes) -> "OwnTimings":
        """Read TOML. ValueError names what is wrong."""
        return msgspec.toml.decode(text, type=cls)


class _Timed(NamedTuple):
    units: tuple[float, ...]
    seconds: float


class OwnSteps:
    """Steps by own timings of whole steps: the same form, with one price per unit in each layout."""

    def __init__(self, name: str, model: ConsideredModel, ranks: int, timings: OwnTimings) -> None:
        """Fit. ValueError without times of ep and tp, or of a layout at too few points."""
        rows: dict[LayoutName, list[_Timed]] = defaultdict(list)
        for one in timings.times:
            for count, time in zip(one.sequences, one.milliseconds, strict=True):
                units = _whole_step(step_units(model, one.layout, ranks, count, one.context))
                rows[one.layout].append(_Timed(units, time / 1e3))
        few = [layout for layout in ("ep", "tp") if len(rows.get(layout, ())) < _FEWEST]
        if few:
            raise ValueError(f"needs at least {_FEWEST} timings of {' and '.join(few)}, to compare ep and tp")
        self.kernels = name
        self._model, self._ranks = model, ranks
        self._prices = {layout: _fit(some).prices for layout, some in rows.items()}
        self.errors = {layout: _error_left_out(some) for layout, some in rows.items()}
        by_layout = {
            layout: [one for one in timings.times if one.layout == layout] for layout in self._prices
        }
        self.sequences = _common([[n for one in some for n in one.sequences] for some in by_layout.values()])
        self.contexts = _common([[one.context for one in some] for some in by_layout.values()])

    def seconds(self, layout: LayoutName, sequences: int, context: int) -> float:
        """Return the duration of a step."""
        units = _whole_step(step_units(self._model, layout, self._ranks, sequences, context))
        return sum(price * amount for price, amount in zip(self._prices[layout], units, strict=True))


_FEWEST = 4
"""timings of a layout for a fit: fewer say nothing of its shape"""


def _whole_step(parts: Mapping[PartName, Units]) -> tuple[float, ...]:
    """Return the units of a whole step: of its parts, those that differ in kind are kept apart."""
    return (
        1.0,
        parts["experts"].gigabytes,
        sum(part.teraflops for part in parts.values()),
        parts["attention"].gigabytes,
        parts["projections"].thousands,
        parts["collectives"].gigabytes,
        parts["collectives"].thousands,
    )


def _fit(rows: Sequence[_Timed]) -> Fitted:
    return fitted([one.units for one in rows], [one.seconds for one in rows])


def _error_left_out(rows: Sequence[_Timed]) -> float:
    """Return the error of predicting each timing from the others, root mean square: a fit with as many prices
    as timings has no error of its own."""
    squares = []
    for at, one in enumerate(rows):
        prices = _fit([*rows[:at], *rows[at + 1 :]]).prices
        predicted = sum(price * amount for price, amount in zip(prices, one.units, strict=True))
        squares.append((predicted / one.seconds - 1.0) ** 2)
    return float((sum(squares) / len(squares)) ** 0.5)


def _common(numbers: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the range that all layouts were timed in. ValueError if there is none."""
    low, high = max(map(min, numbers)), min(map(max, numbers))
    if low > high:
        raise ValueError(
            f"own times: the layouts have no sequences or contexts in common ({low} to {high}); time both at"
            " the same points"
        )
    return low, high
