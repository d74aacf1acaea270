"""Serving of Roost's own engines: answer streams, fact log, checkpoint tokenizer, and the HTTP server of a
rank.

Admission rule: code that engines with and without weights both need beside `batching`, and that awaits or
reads files. Free of torch.
"""
