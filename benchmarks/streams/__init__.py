"""Cost of a streamed token (`python -m benchmarks.streams`). Its source, clients and smallest relay are
processes of their own.
"""
