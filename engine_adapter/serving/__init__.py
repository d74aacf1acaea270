"""Serving of every engine of ours: answers, the log of facts, the tokenizer of a checkpoint, and the HTTP server of a rank.

Admission rule: what an engine with weights and one without both need beside `batching`, and that awaits or reads files. Free of torch.
"""
