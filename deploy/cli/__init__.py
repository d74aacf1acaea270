"""The `roost` command: one module per group of subcommands."""

from deploy.cli.app import main

__all__ = ["main"]
