"""Measurements of the outcome of decisions: speeds, pricing errors, reports to the tracker.

Admission rule: code that awaits these measurements. The pure formulas are in `evaluation` and `scheduling`.
"""
