"""One HTTP exchange as values: the response over ASGI, server-sent events, and the memory that bodies hold.
Pure.
"""
