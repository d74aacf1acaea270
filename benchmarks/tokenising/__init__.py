"""Benchmark of tokenising: turns of conversations, and throughput by workers."""
