"""Ranks that are left out because they fail or stand out. Pure; time comes in as an argument."""
