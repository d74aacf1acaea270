"""Reports of ranks: dispatch statistics, and the experts that requests activated."""
