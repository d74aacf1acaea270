"""How the house is put together and run: the `roost` command is the composition root; nothing imports this package."""
