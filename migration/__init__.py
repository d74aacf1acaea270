"""Hears demand and placement, plans, and conducts handovers. Its first form owns the record of which placement each engine serves."""
