"""Options shared by all commands, and drawing on terminals and into files."""
