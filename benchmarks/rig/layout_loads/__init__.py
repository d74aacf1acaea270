"""Simulation of an engine that changes its layout under load, and the best schedule known with hindsight."""
