"""Agent of a vLLM deployment: finds its ranks, follows its KV events and load, and carries placements to the
plugin in its worker processes."""
