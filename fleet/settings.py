"""Types of settings that two or more parts share. Pure."""

from typing import NewType

FilePath = NewType("FilePath", str)
"""A setting that names a file or folder, as written in the configuration. The caller that opens it converts
it to a path: settings need no file system.
"""
