"""Types of settings that two or more parts have. Pure."""

from typing import NewType

FilePath = NewType("FilePath", str)
"""A setting that names a file or folder, as it was written. The caller that opens it makes a path of it: settings themselves need no file system."""
