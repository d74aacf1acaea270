"""Events of many publishers arrive over one socket."""

import pytest
import zmq

from router.dynamo.zmq_events import ZmqFeed


async def test_messages_of_all_followed_publishers_arrive() -> None:
    with zmq.Context() as context, context.socket(zmq.XPUB) as one, context.socket(zmq.XPUB) as two:
        addresses = {
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in (one, two)
        }
        async with ZmqFeed() as feed:
            feed.follow(addresses)
            feed.follow(addresses)
            for socket in (one, two):  # the subscriptions have arrived
                assert {socket.recv(), socket.recv()} == {b"\x01kv-events", b"\x01kv_metrics"}
            one.send_multipart([b"forward-pass-metrics", b"not this"])
            for number in range(50):
                one.send_multipart([b"kv-events", b"one", bytes([number])])
                two.send_multipart([b"kv-events", b"two", bytes([number])])
            received = [await feed.receive() for _ in range(100)]
            feed.follow(set())
        for name in (b"one", b"two"):
            assert [frames[2][0] for frames in received if frames[1] == name] == list(range(50))
        for socket in (one, two):
            socket.close(0)


async def test_an_address_that_is_none_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with ZmqFeed() as feed:
        feed.follow({"tcp://nowhere"})
        feed.follow(set())
    assert "cannot be received" in caplog.text
