"""The `roost` command: one module for each group of subcommands."""

from deploy.cli.app import main

__all__ = ["main"]
