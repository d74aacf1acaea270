"""Our own compact torch engine behind the Engine port: the default, and the reference for every mechanism."""
