"""Switch of an engine's attention between data-parallel and tensor-parallel: the KV pages and requests of the
next layout, and the copies that fill its pages. Pure; see docs/decisions/0020-attention-between-layouts.md.

Admission rule: decisions about pages and requests of several ranks at once. What one rank decides for itself
is in `batching`.
"""
