"""Operator's API over the bus: drain, migrate, pause the loop, read placements and fleet state.

Admission rule: usable from any Python program. Imports no command-line libraries (typer, rich, matplotlib).
"""
