"""Complete engine on the time model (`fleet.timing`), without weights: many ranks on one machine, for tests,
soaks and simulation.

Admission rule: substitutes for weights, GPUs and their faults. Everything else is in
`engine_adapter.serving`. Free of torch.
"""
