"""One HTTP exchange as values: the response over ASGI, and the memory that bodies hold. Pure."""
