"""What waits for the agent is bounded, and ends with the connection."""

from roost_vllm.outbox import MOST_BYTES, Outbox
from roost_vllm.wire import LinkError, RoutedRequest


def request(number: int, size: int) -> RoutedRequest:
    return RoutedRequest(
        request=str(number), prompt_tokens=1, first=0, positions=1, top_k=1, experts=bytes(size)
    )


def waiting(outbox: Outbox) -> list[str]:
    found = []
    while (message := outbox.take()) is not None:
        found.append(message.request if isinstance(message, RoutedRequest) else "")
    return found


def opened() -> Outbox:
    outbox = Outbox()
    outbox.open()
    return outbox


def test_messages_are_taken_in_the_order_in_which_they_were_put() -> None:
    outbox = opened()
    assert all(outbox.put(request(number, 10)) for number in range(3))
    assert waiting(outbox) == ["0", "1", "2"]
    assert outbox.bytes == 0


def test_of_more_than_64_megabytes_the_oldest_go() -> None:
    outbox = opened()
    for number in range(10):
        outbox.put(request(number, 16 * 1024 * 1024 - 4096))
        assert outbox.bytes <= MOST_BYTES
    assert waiting(outbox) == ["6", "7", "8", "9"]


def test_short_messages_are_bounded_too() -> None:
    outbox = opened()
    for _ in range(100_000):
        outbox.put(LinkError(reason="again"))
    assert 10_000 < len(waiting(outbox)) < 70_000


def test_without_a_connection_nothing_waits() -> None:
    outbox = Outbox()
    assert not outbox.put(request(0, 10))
    outbox.open()
    outbox.put(request(1, 10))
    outbox.close()
    assert not outbox.put(request(2, 10))
    outbox.open()
    assert (waiting(outbox), outbox.bytes) == ([], 0)
