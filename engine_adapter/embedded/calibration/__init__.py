"""Calibration at the start of a rank: what its steps cost, in every layout that it can serve."""
