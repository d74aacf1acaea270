"""Steps of a real engine, each with its duration and what it computed, for `benchmarks.step_model`."""
