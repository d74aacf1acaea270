"""Plans and figures in the words of a record. Pure."""

from migration.objective import Figures
from migration.record import Measures


def measures(figures: Figures) -> Measures:
    """A placement's figures as they are told."""
    seconds = figures.seconds
    return Measures(
        balance_mean=figures.balance,
        balance_min=figures.least_balance,
        local_share=figures.local,
        remote_ranks=figures.remote_ranks,
        remote_nodes=figures.remote_nodes,
        step_seconds=seconds.total,
        expert_seconds=seconds.experts,
        dispatch_seconds=seconds.dispatch,
        memory_seconds=seconds.memory,
    )
