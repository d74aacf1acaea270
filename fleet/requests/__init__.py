"""Messages that ask one service for something, and its answers."""
