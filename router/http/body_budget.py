"""Memory for the bodies of open requests: one bound for all of them, shared between clients. Pure.

One client may hold at most as much as is still free (the dynamic threshold of Choudhury and Hahne, "Dynamic
queue length thresholds for shared-memory packet switches", 1998, with alpha = 1). A single client can take
half of the memory, a second greedy client a quarter, and so on. So one client cannot fill the memory, and a
client that holds little finds room while few clients hold much.
"""

from fleet.completions import ApiError

BODIES_FULL = "bodies_full"
"""Error code of a body that was refused before it was read completely."""
_RETRY_SECONDS = 2.0


class BodyBudget:
    """Accounting of body memory. State: bytes held, by client and in total."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.refused = 0
        self._by_client: dict[str, int] = {}

    @property
    def clients(self) -> int:
        """Number of clients that hold memory."""
        return len(self._by_client)

    def share(self, client: str) -> "BodyShare":
        """Return the share of one request of a client, which holds nothing yet."""
        return BodyShare(self, client)

    def fits(self, client: str, more: int) -> bool:
        return self._by_client.get(client, 0) + more <= self.total - self.held

    def take(self, client: str, more: int) -> bool:
        """Hold `more` bytes for a client. Return false, and hold nothing, if they do not fit."""
        held = self._by_client.get(client, 0) + more
        if held > self.total - self.held:
            return False
        if more:
            self.held += more
            self._by_client[client] = held
        return True

    def give_back(self, client: str, held: int) -> None:
        """Release `held` bytes of a client."""
        self.held -= held
        left = self._by_client[client] - held
        if left:
            self._by_client[client] = left
        else:
            del self._by_client[client]


class BodyShare:
    """Memory held by the body of one request until `release`."""

    __slots__ = ("_budget", "_client", "held")

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.held = 0

    def announce(self, size: int) -> None:
        """Check that a body of this size will fit, without holding memory. ApiError 503 when it will not."""
        if not self._budget.fits(self._client, size - self.held):
            self._refuse()

    def add(self, size: int) -> None:
        """Hold memory for bytes that arrived. ApiError 503 when they do not fit."""
        if not self._budget.take(self._client, size):
            self._refuse()
        self.held += size

    def __enter__(self) -> "BodyShare":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release all memory of the request. Idempotent."""
        if self.held:
            self._budget.give_back(self._client, self.held)
            self.held = 0

    def _refuse(self) -> None:
        self._budget.refused += 1
        message = (
            f"no memory is left for this body: the router holds {self._budget.held} bytes of bodies, of at"
            f" most {self._budget.total}"
        )
        raise ApiError(503, message, code=BODIES_FULL, retry_after=_RETRY_SECONDS)
