"""What the bus said about each engine: its placement, its demand, its liveness. Pure folds; time comes in as an argument."""
