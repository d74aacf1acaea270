"""Memory for the bodies of open requests: a bound over all of them, shared between clients. Pure.

One client may hold at most as much as is still free (the dynamic threshold of Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", 1998, with alpha = 1): alone it may have half of the memory, the next one that comes and wants all it can get a
quarter, and so on. So one client cannot fill it, and a client that holds little finds room while few hold much.
"""

from fleet.completions import ApiError

BODIES_FULL = "bodies_full"
"""Code of the error of a body that was refused before it was read to its end."""
_RETRY_SECONDS = 2.0


class BodyBudget:
    """State: bytes held, by client and in total."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.refused = 0
        self._by_client: dict[str, int] = {}

    @property
    def clients(self) -> int:
        """that hold any"""
        return len(self._by_client)

    def share(self, client: str) -> "BodyShare":
        """What one request of a client holds: nothing yet."""
        return BodyShare(self, client)

    def fits(self, client: str, more: int) -> bool:
        return self._by_client.get(client, 0) + more <= self.total - self.held

    def take(self, client: str, more: int) -> bool:
        """Hold so many bytes more for a client. False, and none, where they do not fit."""
        held = self._by_client.get(client, 0) + more
        if held > self.total - self.held:
            return False
        if more:
            self.held += more
            self._by_client[client] = held
        return True

    def give_back(self, client: str, held: int) -> None:
        """Hold so many bytes less for a client."""
        self.held -= held
        left = self._by_client[client] - held
        if left:
            self._by_client[client] = left
        else:
            del self._by_client[client]


class BodyShare:
    """The memory that the body of one request holds until `release`."""

    __slots__ = ("_budget", "_client", "held")

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.held = 0

    def announce(self, size: int) -> None:
        """A body of so many bytes will come; nothing is held for it yet. ApiError 503 when there is no room for it."""
        if not self._budget.fits(self._client, size - self.held):
            self._refuse()

    def add(self, size: int) -> None:
        """So many bytes have come. ApiError 503 when there is no room for them."""
        if not self._budget.take(self._client, size):
            self._refuse()
        self.held += size

    def release(self) -> None:
        """Idempotent."""
        if self.held:
            self._budget.give_back(self._client, self.held)
            self.held = 0

    def _refuse(self) -> None:
        self._budget.refused += 1
        said = f"no memory is left for this body: the router holds {self._budget.held} bytes of bodies, of at most {self._budget.total}"
        raise ApiError(503, said, code=BODIES_FULL, retry_after=_RETRY_SECONDS)
