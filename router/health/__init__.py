"""Exclusion of ranks that fail or are outliers. Pure; the time comes in as an argument."""
