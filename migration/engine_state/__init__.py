"""State of each engine as received from the bus: placement, demand, liveness. Pure folds; time is an
argument."""
