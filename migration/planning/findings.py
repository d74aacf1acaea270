"""Findings of a planning run: reason codes with their numbers. `sentences` turns them into text. Pure."""

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any


class FindingCode(StrEnum):
    """Fact or decision that a planning run reports. The values of each are in `sentences.TEXTS`."""

    # The view
    SHARDED = auto()
    TOO_FEW_PAIRS = auto()
    ONE_WINDOW = auto()
    NO_PAIR_TIME = auto()
    CACHE_UNKNOWN = auto()
    # No plan
    AT_CEILING = auto()
    BELOW_LEAST_GAIN = auto()
    DOES_NOT_PAY = auto()
    POLICY_UNABLE = auto()
    # Candidates
    OUTCOME = auto()
    TOO_MANY_COPIES = auto()
    COPIES_OUTWEIGH = auto()
    GAINS_NO_MORE = auto()
    COSTS_MORE = auto()
    NOT_NEEDED = auto()
    SMALL_AT_MOST = auto()
    IMPOSSIBLE = auto()
    CHOSEN = auto()
    # Forms of single layers
    LAYERS_TURN = auto()
    LAYERS_EQUAL = auto()
    LAYERS_AT_HALF = auto()
    LAYERS_BEYOND_BUDGET = auto()
    LAYERS_DO_NOT_PAY = auto()
    LAYERS_GAIN_NO_MORE = auto()
    # Loss of ranks
    RANKS_LOST = auto()
    CRITICAL = auto()
    CRITICAL_UNABLE = auto()
    # Locality and homes
    CHEAP_DISPATCH = auto()
    FOLLOWS_HOMES = auto()
    SPECIALISATION = auto()
    TOO_ALIKE = auto()
    NO_CLUSTERS = auto()
    OTHER_CLUSTERS = auto()
    UNPREDICTABLE = auto()
    SINGLE_CLUSTER = auto()
    REACH_HOME = auto()
    HOMES_SAVE_TOO_LITTLE = auto()
    PRESENT_HOMES_SAVE = auto()
    HOMES_SAVE_HERE = auto()
    HOMES_AND_PLACEMENT_SMALL = auto()
    POLICY_WITHOUT_HOMES = auto()
    UNTIL_LAST_HANDOVER = auto()
    WITH_THE_PLACEMENT = auto()


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason code with its numbers. about: strategy or subject of the finding; empty: the whole run."""

    code: FindingCode
    values: dict[str, Any]
    about: str = ""

    @classmethod
    def of(cls, code: FindingCode, about: str = "", **values: Any) -> "Finding":
        """Make a finding with the values that the text of its code names."""
        return cls(code, values, about)

    def of_subject(self, about: str) -> "Finding":
        """Return the same finding about a subject."""
        return Finding(self.code, self.values, about)


class Infeasible(ValueError):
    """Error: a strategy makes no candidate. `finding` gives the reason."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.code)
        self.finding = finding
