"""Prices of decode steps, fitted to published kernel timings."""
