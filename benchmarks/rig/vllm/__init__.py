"""A real vLLM under measurement: its counters step by step, its servers, the arms that are compared."""
