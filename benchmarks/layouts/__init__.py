"""Benchmarks of choosing a layout: the calibrated step times, and single layers."""
