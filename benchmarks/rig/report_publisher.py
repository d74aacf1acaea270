"""Publisher of expert activation reports to NATS at the reader's speed, on a bare socket, so that the reader
is the bottleneck.

Every rank's message is encoded once; only its sequence number is rewritten. The number of messages in flight
is bounded by the reader's count (in a shared file of 8 bytes) plus a fixed number: no message is lost for
lack of buffer space, and the reader never waits.

    python -m benchmarks.rig.report_publisher PORT NAMESPACE COUNTER MESSAGES LAYERS EXPERTS RANKS UNDER_WAY
"""

import mmap
import socket
import struct
import sys
import time
from pathlib import Path

import numpy as np

from bus.protocol.codec import encode, seal, topic_of
from bus.protocol.subjects import Subjects
from fleet.facts.activity import ExpertsActivated
from fleet.popularity import ExpertCounts

FIRST = 1 << 16
"""Sequence numbers have five bytes from here on (msgpack: 0xce and u32)."""
TOKENS = 2000
TOP_K = 8


def report(layers: int, experts: int, rank: int, ranks_per_engine: int = 8) -> ExpertsActivated:
    """Return one second's report of a rank that computed TOKENS tokens."""
    random = np.random.default_rng(rank)
    popularity = random.dirichlet(np.full(experts, 0.5), layers)
    counts = np.stack([random.multinomial(TOKENS * min(TOP_K, experts), row) for row in popularity])
    worker_id, number = divmod(rank, ranks_per_engine)
    return ExpertsActivated(
        engine=f"engine-{worker_id}",
        worker_id=worker_id + 1,
        rank=number,
        model="model",
        epoch=0,
        seconds=1.0,
        tokens=TOKENS,
        cached_tokens=0,
        counts=ExpertCounts.of(counts),
    )


def frames(namespace: str, layers: int, experts: int, ranks: int) -> list[tuple[bytearray, int]]:
    """Return each rank's NATS frame, and the offset of its sequence number."""
    made = []
    for rank in range(ranks):
        message = report(layers, experts, rank)
        subject = Subjects(namespace).experts(message.engine)
        payload = encode(topic_of(subject), message)
        envelope = seal(1_000_000 + rank, FIRST, time.time(), topic_of(subject), payload)
        head = b"PUB %s %d\r\n" % (subject.encode(), len(envelope))
        at = envelope.index(b"\xa8sequence\xce") + len(b"\xa8sequence\xce")
        made.append((bytearray(head + envelope + b"\r\n"), len(head) + at))
    return made


def main(
    port: int,
    namespace: str,
    counter: str,
    messages: int,
    layers: int,
    experts: int,
    ranks: int,
    under_way: int,
) -> None:
    """Send `messages` messages, then wait until the reader has counted them all."""
    made = frames(namespace, layers, experts, ranks)
    with (
        Path(counter).open("rb") as file,
        mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ) as read,
        socket.create_connection(("127.0.0.1", port)) as sock,
    ):
        sock.sendall(b'CONNECT {"verbose":false,"pedantic":false,"lang":"bench","version":"1"}\r\n')
        for number in range(messages):
            while number - struct.unpack("<Q", read[:8])[0] >= under_way:
                time.sleep(0.0005)
            frame, at = made[number % ranks]
            struct.pack_into(">I", frame, at, FIRST + number // ranks)
            sock.sendall(frame)
        sock.sendall(b"PING\r\n")
        while struct.unpack("<Q", read[:8])[0] < messages:
            time.sleep(0.001)


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    main(int(first), rest[0], rest[1], *(int(word) for word in rest[2:]))
