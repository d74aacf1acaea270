"""Expected and actual outcome of a decision, compared. Pure."""
