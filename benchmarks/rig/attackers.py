"""Attacking clients as a process: `python -m benchmarks.rig.attackers KIND PORT MODEL FOLDER`. It prints
"attacking" once its attack runs; FOLDER holds the large bodies (`write_bodies`).

Each attack needs no key. The process has a lower priority than the others, since an attacker's machine would
not use the router's processors. It attacks from 127.0.0.2, so that per-client turns and memory shares can
separate it from other clients.
"""

import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ADDRESS = "127.0.0.2"
LARGE = 7_900_000
"""bytes of a large body; 8 MiB is the router's limit"""
SENDERS = 4
"""connections that send large bodies, sequentially"""
_NICENESS = 15
_HEAD = (
    "POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length:"
    " {length}\r\n\r\n"
)


LARGE_BODIES = {
    "8 MB of one word": "chat/completions",
    "8 MB of special tokens": "chat/completions",
    "8 MB of distinct words": "chat/completions",
    "130,000 tiny messages": "chat/completions",
    "2.6 M ids": "completions",
    "2.6 M empty lists": "completions",
}
"""by attack: path below /v1/"""


def write_bodies(model: str, folder: Path) -> None:
    """Write every large body to a file named after its attack, since generating them takes seconds."""
    chance = random.Random(3)
    words = " ".join("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(LARGE // 9))
    request_body = f'{{"model": "{model}", "max_tokens": 1, '.encode()
    tiny = b",".join([b'{"role":"user","content":"a"}'] * 130_000)
    made = (
        _chat(model, "a" * LARGE),
        _chat(model, "<|im_start|>" * (LARGE // 12)),
        _chat(model, words),
        request_body + b'"messages": [' + tiny + b"]}",
        request_body + b'"prompt": [' + b"7," * 2_600_000 + b"7]}",
        request_body + b'"prompt": "a", "x": [' + b"[]," * 2_600_000 + b"[]]}",
    )
    for kind, body in zip(LARGE_BODIES, made, strict=True):
        (folder / kind).write_bytes(body)


def _chat(model: str, content: str) -> bytes:
    return json.dumps(
        {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    ).encode()


def connect(port: int, received_bytes: int = 0) -> socket.socket:
    """Connect to the router. received_bytes: size of the socket's receive buffer, if not the system's."""
    client = socket.socket()
    if received_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes)
    client.settimeout(30)
    client.bind((ADDRESS, 0))
    client.connect(("127.0.0.1", port))
    return client


def send_bodies(port: int, path: str, body: bytes, *, under_way: Callable[[], None]) -> None:
    """Send the same large request repeatedly, over several connections."""
    request = _HEAD.format(path=path, length=len(body)).encode() + body

    def send() -> None:
        while True:
            with contextlib.suppress(OSError), connect(port) as client:
                client.sendall(request)
                under_way()
                while b"\r\n\r\n" not in client.recv(65_536):
                    pass
            time.sleep(0.02)  # a refusal must not cause a storm of connections

    _in_threads(send, SENDERS)


def withhold_bodies(port: int, *, under_way: Callable[[], None]) -> None:
    """Send forty large bodies without their last byte."""
    piece = _HEAD.format(path="chat/completions", length=LARGE).encode() + b" " * (LARGE - 1)

    def withhold() -> None:
        while True:
            with contextlib.suppress(OSError), connect(port) as client:
                client.sendall(piece)
                under_way()
                client.recv(65_536)
            time.sleep(0.2)

    _in_threads(withhold, 40)


def slow_heads(port: int, *, under_way: Callable[[], None]) -> None:
    """Send a thousand bytes of heads a second, over 200 connections."""
    clients = [connect(port) for _ in range(200)]
    for client in clients:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nx-a: ")
    under_way()
    while True:
        for at, client in enumerate(clients):
            try:
                client.sendall(b"a")
            except OSError:
                with contextlib.suppress(OSError):
                    clients[at] = connect(port)
            time.sleep(0.001)


def endless_heads(port: int, *, under_way: Callable[[], None]) -> None:
    """Send heads that never end, as fast as the router reads them."""

    def push() -> None:
        while True:
            with contextlib.suppress(OSError), connect(port) as client:
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
                while True:
                    client.sendall(b"a" * 262_144)
                    under_way()
            under_way()
            time.sleep(0.02)

    _in_threads(push, SENDERS)


def unread_answers(port: int, model: str, *, under_way: Callable[[], None]) -> None:
    """Request forty streams of 20,000 tokens and read none."""
    request_body = json.dumps(
        {"model": model, "max_tokens": 20_000, "stream": True, "prompt": "tell me"}
    ).encode()
    request = _HEAD.format(path="completions", length=len(request_body)).encode() + request_body
    clients = []
    for _ in range(40):
        clients.append(connect(port, received_bytes=4096))
        clients[-1].sendall(request)
    under_way()
    while clients:
        time.sleep(60)


def _in_threads(work: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    kind, port, model, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    os.nice(_NICENESS)
    announced = threading.Event()

    def under_way() -> None:
        if not announced.is_set():
            announced.set()
            print("attacking", flush=True)

    others: dict[str, Callable[[], None]] = {
        "slow heads": lambda: slow_heads(port, under_way=under_way),
        "endless heads": lambda: endless_heads(port, under_way=under_way),
        "withheld bodies": lambda: withhold_bodies(port, under_way=under_way),
        "unread answers": lambda: unread_answers(port, model, under_way=under_way),
    }
    if kind in others:
        others[kind]()
    else:
        send_bodies(port, LARGE_BODIES[kind], (folder / kind).read_bytes(), under_way=under_way)


if __name__ == "__main__":
    main()
