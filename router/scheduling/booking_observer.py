"""Observers of bookings: the parts of a router that follow a request from its decision to its end."""

import msgspec

from router.fleet_state.reservations import Booking
from router.prefix_index.prompt import Prompt
from router.scheduling.decision import Decision


class BookedRequest(msgspec.Struct, frozen=True):
    """A new booking. waited: the request was queued; the rank's state then differs from the recorded one."""

    decision: Decision
    booking: Booking
    prompt: Prompt
    waited: bool = False


class BookingObserver:
    """Observer of this router's bookings. The methods do nothing unless overridden. `RouterService` lists the
    observers in the order in which they are called.
    """

    def booked(self, booked: BookedRequest) -> None:
        """Record a new booking."""

    def first_token(self, booking: Booking, now: float) -> None:
        """Record the first token."""

    def prompt_computed(self, booking: Booking) -> None:
        """Count the prompt as computed. This is an expectation: it updates no speed, and it is no sign of
        life.
        """

    def emitted(self, booking: Booking, tokens: int, now: float) -> None:
        """Record tokens that arrived since the last call."""

    def released(self, booking: Booking) -> None:
        """Record the end of a booking."""
