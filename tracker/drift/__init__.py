"""Drift of demand: told apart from sampling noise. Pure."""
