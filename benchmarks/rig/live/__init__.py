"""Real fleet under measured load: the closed-loop benchmark and its figures."""
