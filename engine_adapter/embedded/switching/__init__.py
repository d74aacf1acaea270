"""Switch of a rank between data-parallel and tensor-parallel attention: reads of KV units out of other ranks'
memory, ahead of the switch and in its step.

Admission rule: it carries out what `kv_switch` decides.
"""
