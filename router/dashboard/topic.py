"""One topic of the dashboard's feed."""

from abc import ABC, abstractmethod
from typing import Any


class Topic(ABC):
    """Source of one topic. Only while a page watches it, `follow` runs and `view` is called, some once a
    second for all pages together.
    """

    name: str
    """name of its events"""

    @abstractmethod
    def view(self) -> Any:
        """Return the present state as values that msgspec encodes. It holds nothing of a prompt, and nothing
        that changes merely because time passes, since an unchanged view is not sent.
        """

    async def follow(self) -> None:  # noqa: B027 most topics show what the router keeps anyway
        """Follow what the router does not keep itself, until cancelled."""
