"""Drift of demand, distinguished from sampling noise. Pure."""
