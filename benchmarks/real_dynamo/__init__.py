"""Benchmarks with a real Dynamo, in the environment of `make test-dynamo`; by hand, not in CI."""
