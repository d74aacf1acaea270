"""Benchmarks with a real vLLM, in an environment of its own (`--python`)."""
