"""Cases and scores of the benchmark of placements."""
