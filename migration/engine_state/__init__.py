"""State of each engine as received from the bus: placement and demand. Pure folds; time is an
argument."""
