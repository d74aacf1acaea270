"""Beside each rank: announces the engine, reports its facts, and takes part in handovers.

Admission rule: what speaks on the bus for an engine, whatever engine it is.
"""
