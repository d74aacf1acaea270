"""Measurements of what became of decisions: speeds, pricing errors, reports to the tracker.

Admission rule: what awaits them. The formulas are pure and live in `evaluation` and `scheduling`.
"""
