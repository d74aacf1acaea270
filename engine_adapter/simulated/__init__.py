"""A whole engine on the time model (`fleet.timing`), without weights: many ranks run on one machine, for tests, soaks and simulation.

Admission rule: what stands in for weights, GPUs and their accidents. Everything else is `engine_adapter.serving`. Free of torch.
"""
