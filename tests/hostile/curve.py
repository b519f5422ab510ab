"""A client of ZMTP 3 with CURVE (RFC 23 and 26 of ZeroMQ) that may break every rule of it."""

import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from tests.hostile import sodium

MORE, LONG, COMMAND = 1, 2, 4
GREETING_BYTES = 64
LIMIT_S = 2.0


@dataclass(frozen=True)
class Pair:
    """A key pair, as bytes."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> "Pair":
        """A fresh one."""
        return cls(*sodium.key_pair())


@dataclass(frozen=True)
class Door:
    """Where a coordinator listens, its public key, and a pair that it knows for each name."""

    port: int
    public: bytes
    pairs: dict[str, Pair]


def greeting(
    mechanism: bytes = b"CURVE", version: bytes = b"\x03\x01", *, server: int = 0
) -> bytes:
    """The first 64 bytes of a connection."""
    return (
        b"\xff"
        + bytes(8)
        + b"\x7f"
        + version
        + mechanism.ljust(20, b"\0")[:20]
        + bytes([server])
        + bytes(31)
    )


def framed(body: bytes, flags: int = 0) -> bytes:
    """One frame."""
    if len(body) > 255:
        return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


def metadata(properties: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Properties as they stand in a READY or an INITIATE."""
    return b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in properties
    )


class Client:
    """One connection to a coordinator, from its greeting on."""

    def __init__(self, door: Door, own: Pair) -> None:
        self._door, self._own = door, own
        self._short = Pair.new()
        self._server_short = b""
        self._cookie = b""
        self._nonces = count(1)
        self.socket = socket.create_connection(("127.0.0.1", door.port), timeout=LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Some bytes."""
        self.socket.sendall(data)

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            if not piece:
                raise ConnectionResetError
            data += piece
        return data

    def _read_frame(self) -> bytes:
        flags, length = self._read(2)
        if flags & LONG:
            (length,) = struct.unpack(">Q", bytes([length]) + self._read(7))
        return self._read(length)

    def greet(self) -> None:
        """Both greetings."""
        self.send(greeting())
        self._read(GREETING_BYTES)

    def hello(self) -> bytes:
        """The body of a HELLO."""
        nonce = struct.pack(">Q", next(self._nonces))
        box = sodium.box(
            bytes(64), b"CurveZMQHELLO---" + nonce, self._door.public, self._short.secret
        )
        return b"\x05HELLO\x01\x00" + bytes(72) + self._short.public + nonce + box

    def welcomed(self) -> None:
        """Read the WELCOME."""
        body = self._read_frame()
        nonce = b"WELCOME-" + body[8:24]
        plain = sodium.opened(body[24:], nonce, self._door.public, self._short.secret)
        assert plain is not None, "the coordinator's WELCOME cannot be opened"
        self._server_short, self._cookie = plain[:32], plain[32:]

    def initiate(self, properties: bytes, *, vouch_for: bytes | None = None) -> bytes:
        """The body of an INITIATE with these properties."""
        vouch_nonce = b"%016d" % next(self._nonces)
        vouch = sodium.box(
            (vouch_for or self._short.public) + self._door.public,
            b"VOUCH---" + vouch_nonce,
            self._server_short,
            self._own.secret,
        )
        nonce = struct.pack(">Q", next(self._nonces))
        box = sodium.box(
            self._own.public + vouch_nonce + vouch + properties,
            b"CurveZMQINITIATE" + nonce,
            self._server_short,
            self._short.secret,
        )
        return b"\x08INITIATE" + self._cookie + nonce + box

    def enter(self, properties: bytes) -> bytes:
        """The whole handshake. Returns what the coordinator says at its end."""
        self.greet()
        self.send(framed(self.hello(), COMMAND))
        self.welcomed()
        self.send(framed(self.initiate(properties), COMMAND))
        return self._read_frame()

    def message(self, plain: bytes, flags: int = 0, *, nonce: int | None = None) -> bytes:
        """A frame of traffic; flags of what is in it: 1 more, 2 command."""
        short = struct.pack(">Q", next(self._nonces) if nonce is None else nonce)
        box = sodium.box(
            bytes([flags]) + plain,
            b"CurveZMQMESSAGEC" + short,
            self._server_short,
            self._short.secret,
        )
        return framed(b"\x07MESSAGE" + short + box)

    def close(self, *, is_reset: bool = False) -> None:
        """End it, also in the middle of something."""
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()
