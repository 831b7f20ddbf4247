"""TCP bandwidth of a link in both directions at once, with plain sockets.

python benchmarks/bandwidth.py serve ADDRESS PORT SECONDS     on one node
python benchmarks/bandwidth.py call ADDRESS PORT SECONDS      on the other; each prints the bytes per second received
"""

from __future__ import annotations

import socket
import sys
import threading
import time

_BLOCK = 2**18
_LIMIT = 10.0


def receive_rate(connection: socket.socket, seconds: float) -> float:
    """Send as fast as the other end receives, and receive; return the bytes per second received.

    The first fifth of the time is not counted: queues fill, and TCP adapts its rate.
    """
    stop = time.monotonic() + seconds
    sender = threading.Thread(target=_send, args=(connection, stop))
    sender.start()
    arrivals: list[tuple[float, int]] = []
    while block := connection.recv(_BLOCK):
        now = time.monotonic()
        if now > stop - 0.8 * seconds:
            arrivals.append((now, len(block)))
    sender.join()
    if len(arrivals) < 2:
        raise ConnectionError("the other end has sent next to nothing")
    return sum(count for _, count in arrivals[1:]) / (arrivals[-1][0] - arrivals[0][0])


def _send(connection: socket.socket, stop: float) -> None:
    block = bytes(_BLOCK)
    while time.monotonic() < stop:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def connect(serve: bool, address: str, port: int) -> socket.socket:
    """Return a connection: wait for the other end to connect, or connect to it as soon as it listens."""
    if serve:
        with socket.create_server((address, port)) as server:
            server.settimeout(_LIMIT)
            return server.accept()[0]
    deadline = time.monotonic() + _LIMIT
    while True:
        try:
            return socket.create_connection((address, port), _LIMIT)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    with connect(sys.argv[1] == "serve", sys.argv[2], int(sys.argv[3])) as line:
        line.settimeout(_LIMIT)
        print(receive_rate(line, float(sys.argv[4])))
