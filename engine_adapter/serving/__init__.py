"""What every rank of an engine of ours has beside its computing: the books of its KV cache, its scheduler, its answers and its HTTP face.

Admission rule: what an engine with weights and one without both need. Free of torch.
"""
