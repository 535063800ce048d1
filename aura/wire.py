"""Connections between machines, each measured: round trip, clocks, rate and loss. The sockets are our own, so that it
works before any backend does."""

import contextlib
import os
import select
import socket
import statistics
import struct
import sys
import threading
import time

from aura.files import explain

CONNECT_SECONDS = 5  # for one connection: a lost first packet is sent again after 1 and after 3 s
PINGS = 20
RATE_SECONDS = 0.6  # of sending in each direction
WARMUP_SECONDS = 0.1  # of these, while TCP finds its rate
WINDOW_SECONDS = 0.05  # the rate is the median over such windows: one that a busy processor delayed does not count
BLOCK_BYTES = 1 << 16
UNSENT_BYTES = 1 << 17  # at most waiting in the sender's kernel: what is there when time is up has to arrive first
MESSAGES, MESSAGE_BYTES = 1000, 16  # sent one by one to see whether they get lost: at 2 % loss about 20
MESSAGE_WIRE_BYTES = MESSAGE_BYTES + 66  # with the headers of Ethernet, IP and TCP
MESSAGE_SECONDS = 3e-4  # at least from one message to the next
MESSAGE_SHARE = 0.2  # of the measured rate, at most: far from filling the queue of a slow link, which would drop some
LOSS_SECONDS = 1.5  # at most for the messages
ENOUGH_MESSAGES = 300  # fewer prove nothing about a loss of 1 %
END = 1  # last byte of a stream of zeros


class Desk:
    """Accepts the connections of the other leaders, and keeps them and those it has made by rank: `accepted` and
    `dialled`. A leader that connects sends `token` and its rank and gets the token back, so that no other program is
    taken for either."""

    def __init__(self, rank, address):
        self.rank, self.token = rank, os.urandom(8)
        self.accepted, self.dialled = {}, {}
        self.listener = socket.create_server(("", 0))
        self.card = {"address": address, "port": self.listener.getsockname()[1], "token": self.token.hex()}
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self.listener.close()
        for connection in (*self.accepted.values(), *self.dialled.values()):
            connection.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._greet, args=[connection], daemon=True).start()

    def _greet(self, connection):
        try:
            connection.settimeout(CONNECT_SECONDS)
            token, rank = struct.unpack("!8sI", receive(connection, 12))
            if token != self.token:
                raise ConnectionAbortedError
            self.accepted[rank] = connection
            connection.sendall(token)
        except OSError:
            connection.close()

    def dial(self, rank, card):
        """Connect to leader `rank`; returns None or why it cannot be done, in Spanish."""
        token = bytes.fromhex(card["token"])
        try:
            connection = socket.create_connection((card["address"], card["port"]), timeout=CONNECT_SECONDS)
            self.dialled[rank] = connection
            connection.sendall(struct.pack("!8sI", token, self.rank))
            return None if receive(connection, 8) == token else "contesta otro programa"
        except TimeoutError:
            return "no contesta"
        except ConnectionRefusedError:
            return "rechaza la conexión"
        except OSError as problem:
            return explain(problem)


def measure(connection, first, seconds):
    """Measure a TCP connection; the other end calls it with the other value of `first`. Takes 2 to 4 s.

    Returns a dict: rate, bytes/s that arrived here; retransmitted, share of the segments sent from here that got lost,
    None where it cannot be told; and where `first`: rtt (s), offset of the other clock (s), its uncertainty (s).
    Raises OSError when the other end leaves or has not ended within about `seconds`.
    """
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    result = _ping(connection) if first else _pong(connection)
    for sending in (first, not first):
        if sending:
            rate_away = _pour(connection, deadline)
        else:
            result["rate"] = _drink(connection, deadline)
    for sending in (first, not first):
        if sending:
            result["retransmitted"] = _drip(connection, rate_away)
        else:
            _read_to_end(connection, deadline)
            connection.sendall(b"\0")
    return result


def receive(connection, size):
    """Exactly `size` bytes."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("la otra máquina ha cerrado la conexión")
        data += part
    return data


def _ping(connection):
    """Round trips and NTP's offset (RFC 5905, section 8), of which that of the shortest trip is the best."""
    samples = []
    for _ in range(PINGS):
        sent, started = time.time(), time.perf_counter()
        connection.sendall(b"\0")
        arrived, answered = struct.unpack("dd", receive(connection, 16))
        elapsed = time.perf_counter() - started
        samples.append((elapsed, ((arrived - sent) + (answered - sent - elapsed)) / 2))
    shortest, offset = min(samples)
    return {"rtt": statistics.median(elapsed for elapsed, _ in samples), "offset": offset, "uncertainty": shortest / 2}


def _pong(connection):
    for _ in range(PINGS):
        receive(connection, 1)
        connection.sendall(struct.pack("dd", time.time(), time.time()))
    return {}


def _pour(connection, deadline):
    """Send zeros until the other end says at what rate they arrive; returns that."""
    block = bytes(BLOCK_BYTES)
    while not select.select([connection], [], [], 0)[0]:
        _check(deadline)
        connection.send(block)
    (rate,) = struct.unpack("d", receive(connection, 8))
    connection.sendall(bytes([END]))
    return rate


def _drink(connection, deadline):
    """Receive zeros for a while; returns their rate in bytes/s, by the receiver's clock."""
    buffer, rates, count = bytearray(1 << 20), [], 0
    began = started = None
    while began is None or started - began < RATE_SECONDS or not rates:
        _check(deadline)
        size, now = _receive_into(connection, buffer), time.perf_counter()
        if began is None:
            began = started = now
            continue
        count += size
        if now - started >= WINDOW_SECONDS:
            if started - began >= WARMUP_SECONDS:
                rates.append(count / (now - started))
            started, count = now, 0
    rate = statistics.median(rates)
    connection.sendall(struct.pack("d", rate))
    _read_to_end(connection, deadline)
    return rate


def _drip(connection, rate):
    """Send small messages far apart; returns the share that TCP had to send again, or None.

    So the losses of a full queue, which every slow link has under load, are not counted."""
    before = _segments(connection)
    gap = max(MESSAGE_SECONDS, MESSAGE_WIRE_BYTES / (MESSAGE_SHARE * rate))
    started = time.monotonic()
    for _ in range(MESSAGES):
        connection.sendall(bytes(MESSAGE_BYTES))
        time.sleep(gap)
        if time.monotonic() - started > LOSS_SECONDS:
            break
    connection.sendall(bytes([END]))
    receive(connection, 1)
    after = _segments(connection)
    if before is None or after is None or after[0] - before[0] < ENOUGH_MESSAGES:
        return None
    return max(0, after[1] - before[1]) / (after[0] - before[0])


def _segments(connection):
    """(segments with data sent, of these sent again with reason) from struct tcp_info (linux/tcp.h); None without it.

    A segment that the receiver reports as a duplicate (DSACK, RFC 2883) was only late, as on a busy machine."""
    if not sys.platform.startswith("linux"):
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < 220:  # a kernel before 4.19
        return None
    (again,), (sent,), (duplicates,) = (struct.unpack_from("I", info, offset) for offset in (100, 156, 216))
    return sent, again - duplicates


def _read_to_end(connection, deadline):
    buffer = bytearray(1 << 20)
    while buffer[_receive_into(connection, buffer) - 1] != END:
        _check(deadline)


def _receive_into(connection, buffer):
    size = connection.recv_into(buffer)
    if not size:
        raise ConnectionResetError("la otra máquina ha cerrado la conexión")
    return size


def _check(deadline):
    if time.monotonic() > deadline:
        raise TimeoutError("la medición no terminó a tiempo")
