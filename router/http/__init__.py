"""One HTTP exchange as values: the answer over ASGI, and the memory that bodies hold. Pure."""
