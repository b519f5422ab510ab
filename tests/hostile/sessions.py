"""ZMTP sessions that break the rules, each drawn from a seed."""

import contextlib
import random
import struct
import time
from collections.abc import Callable

from proto.codec import encode
from proto.messages import Fault, FaultCode, Heartbeat
from tests.hostile.curve import COMMAND, LONG, MORE, Client, Door, Pair, framed, greeting, metadata
from tests.proto.test_codec import EXAMPLES

LIMIT_S = 0.2  # of what a session reads and does slowly
FLOOD_FRAMES = 300
FRAMES = (
    *map(encode, EXAMPLES),  # of every kind, also what no node sends
    encode(Heartbeat((), 1, "ready")),
    encode(Fault(0, 0, FaultCode.FAILED, "no memory")),
    encode(Fault(0, 0, FaultCode.UNUSABLE, "no such model")),
)
Draw = random.Random


def claims(draw: Draw, name: str) -> list[tuple[bytes, bytes]]:
    """What an honest node says of itself."""
    kind = draw.choice(("work", "work", "beats"))
    return [
        (b"Socket-Type", b"DEALER"),
        (b"Identity", b""),
        (b"X-Node", f"{kind} {draw.randbytes(4).hex()} {name}".encode()),
    ]


def hostile_claims(draw: Draw, name: str) -> bytes:
    """Properties that an honest node does not send."""
    identity = draw.choice(
        (
            b"",
            b"drafter-1",
            b"\0" + draw.randbytes(4),
            b"\0",
            bytes(255),
            b"x" * 256,
            draw.randbytes(draw.randrange(5000)),
        )
    )
    given = claims(draw, name)
    odd = [
        (b"Identity", identity),
        (b"identity", identity),
        (b"User-Id", b"somebody"),
        (b"__fd", b"3"),
        (b"Socket-Type", draw.choice((b"ROUTER", b"SUB", b"", b"x" * 300, b"REQ"))),
        (b"X-Node", draw.choice((b"", b"work", b"work  ", b"\xff\xfe", b"work 1 drafter-1\0x"))),
        (b"X-Node", b"work " + draw.randbytes(3) + b" " + name.encode()),
        (b"Peer-Address", b"1.2.3.4"),
        (b"", b"empty"),
        (b"n" * 255, draw.randbytes(2000)),
    ]
    given += draw.choices(odd, k=draw.randrange(1, 4))
    draw.shuffle(given)
    properties = metadata(given)
    match draw.randrange(6):
        case 0:
            return properties[: draw.randrange(len(properties))]
        case 1:
            return properties + b"\x05Lying" + b"\xff\xff\xff\xff" + b"short"
        case 2:
            return garbled(draw, properties)
        case _:
            return properties


def garbled(draw: Draw, data: bytes) -> bytes:
    """With a few bytes changed, missing or added."""
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(3):
            case 0 if place < len(changed):
                changed[place] = draw.randrange(256)
            case 1:
                del changed[place : place + draw.randrange(1, 20)]
            case _:
                changed[place:place] = draw.randbytes(draw.randrange(1, 20))
    return bytes(changed)


# -- without a key ---------------------------------------------------------------------------------


def bad_greeting(draw: Draw, door: Door, name: str) -> None:
    """Another version, another mechanism, or none of it."""
    client = Client(door, door.pairs[name])
    with contextlib.closing(client):
        version = draw.choice((b"\x00\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\xff"))
        mechanism = draw.choice((b"NULL", b"PLAIN", b"GSSAPI", b"", b"\xff" * 20))
        hello = draw.choice(
            (
                greeting(mechanism),
                greeting(version=version),
                greeting(server=draw.randrange(256)),
                garbled(draw, greeting()),
                greeting()[: draw.randrange(64)],
                draw.randbytes(draw.randrange(1, 300)),
                b"GET / HTTP/1.1\r\n\r\n",
                b"\x01\x00",
                b"\x06drafter",
            )
        )
        client.send(hello)
        ready = b"\x05READY" + hostile_claims(draw, name)
        client.send(framed(ready, COMMAND) + framed(draw.randbytes(50)))


def slow_greeting(draw: Draw, door: Door, name: str) -> None:
    """A few bytes at a time, and then nothing."""
    client = Client(door, door.pairs[name])
    with contextlib.closing(client):
        sent = greeting() + framed(client.hello(), COMMAND)
        for start in range(0, draw.randrange(len(sent)), 40):
            client.send(sent[start : start + 40])
            time.sleep(draw.random() * LIMIT_S / 20)


def bad_hello(draw: Draw, door: Door, name: str) -> None:
    """A first command of a wrong size, length or content."""
    client = Client(door, door.pairs[name])
    with contextlib.closing(client):
        client.greet()
        hello = client.hello()
        huge = draw.choice((1 << 40, (1 << 63) - 1, (1 << 64) - 1, (1 << 23) + 1))
        client.send(
            draw.choice(
                (
                    framed(garbled(draw, hello), COMMAND),
                    framed(hello[: draw.randrange(len(hello))], COMMAND),
                    framed(hello + draw.randbytes(draw.randrange(1, 9000)), COMMAND),
                    framed(hello, draw.choice((0, MORE, COMMAND | MORE, 0xF8))),
                    bytes([COMMAND | LONG]) + struct.pack(">Q", huge) + hello,
                    framed(b"", COMMAND),
                    framed(b"\xff", COMMAND),
                    framed(b"\x05ERROR\x03400", COMMAND),
                    framed(b"\x04PING\x00\x01", COMMAND),
                    framed(hello, COMMAND) * 2,
                    draw.randbytes(300),
                )
            )
        )


def bad_initiate(draw: Draw, door: Door, name: str) -> None:
    """A second command of a wrong size or content, or another than that."""
    client = Client(door, door.pairs[name])
    with contextlib.closing(client):
        client.greet()
        client.send(framed(client.hello(), COMMAND))
        client.welcomed()
        right = client.initiate(metadata(claims(draw, name)))
        client.send(
            draw.choice(
                (
                    framed(garbled(draw, right), COMMAND),
                    framed(right[: draw.randrange(len(right))], COMMAND),
                    framed(right[:9], COMMAND),
                    framed(right + bytes(9000), COMMAND),
                    framed(client.initiate(b"", vouch_for=bytes(32)), COMMAND),
                    framed(right, COMMAND | MORE),
                    framed(b"\x08INITIATE" + draw.randbytes(300), COMMAND),
                    framed(client.hello(), COMMAND),
                    framed(b"\x05READY", COMMAND),
                    b"",
                )
            )
        )


def unknown_key(draw: Draw, door: Door, name: str) -> None:
    """Everything right but the key."""
    client = Client(door, Pair.new())
    with contextlib.closing(client):
        client.enter(metadata(claims(draw, name)))
        client.send(draw.randbytes(100))


# -- with a key ------------------------------------------------------------------------------------


def hostile_properties(draw: Draw, door: Door, name: str) -> None:
    """A handshake whose properties are none, and then some words."""
    client = Client(door, door.pairs[name])
    with contextlib.closing(client):
        client.enter(hostile_claims(draw, name))
        client.send(client.message(b"") + client.message(draw.choice(FRAMES)))


def impatient(draw: Draw, door: Door, name: str) -> None:
    """Frames before the coordinator has said that the key is known."""
    client = Client(door, door.pairs[name])
    with contextlib.closing(client):
        client.greet()
        client.send(framed(client.hello(), COMMAND))
        client.welcomed()
        first = framed(client.initiate(metadata(claims(draw, name))), COMMAND)
        client.send(first + client.message(b"") * draw.randrange(1, 5))


def inside(draw: Draw, door: Door, name: str) -> Client:
    """A connection that was let in."""
    client = Client(door, door.pairs[name])
    try:
        client.enter(metadata(claims(draw, name)))
        client.send(client.message(b""))
    except OSError:
        client.close()
        raise
    return client


def bad_frames(draw: Draw, door: Door, name: str) -> None:
    """Frames that are no messages, or damaged ones, and boxes that cannot be opened."""
    client = inside(draw, door, name)
    with contextlib.closing(client):
        for _ in range(draw.randrange(1, 12)):
            right = client.message(draw.choice(FRAMES))
            client.send(
                draw.choice(
                    (
                        right,
                        right + right,  # a nonce twice
                        client.message(draw.choice(FRAMES), nonce=draw.randrange(4)),
                        client.message(garbled(draw, draw.choice(FRAMES))),
                        client.message(draw.randbytes(draw.randrange(2000))),
                        client.message(draw.choice(FRAMES), draw.randrange(256)),
                        garbled(draw, right),
                        framed(b"\x07MESSAGE" + bytes(draw.randrange(30))),
                        bytes([LONG]) + struct.pack(">Q", 1 << draw.randrange(20, 64)) + right,
                    )
                )
            )


def commands(draw: Draw, door: Door, name: str) -> None:
    """Commands in the middle of the traffic."""
    client = inside(draw, door, name)
    with contextlib.closing(client):
        words = (
            b"\x04PING",
            b"\x04PING\x00\x01",
            b"\x04PING\x00\x00" + bytes(200),
            b"\x04PING\xff\xff" + bytes(16),
            b"\x04PONG",
            b"\x05ERROR\x03400",
            b"\x05ERROR\xff",
            b"\x09SUBSCRIBE" + bytes(100),
            b"\x06CANCEL",
            b"\x05READY",
            b"\x00",
            b"",
            b"\xffshort",
        )
        for _ in range(draw.randrange(1, 30)):
            flags = draw.choice((COMMAND, COMMAND, COMMAND | MORE, 0))
            client.send(client.message(draw.choice(words), flags))


def parts_without_end(draw: Draw, door: Door, name: str) -> None:
    """One message of ever more parts."""
    client = inside(draw, door, name)
    part = bytes(draw.choice((0, 10, 1000)))
    with contextlib.suppress(OSError):
        for _ in range(draw.randrange(FLOOD_FRAMES)):
            client.send(client.message(part, MORE))
        if draw.random() < 0.3:
            client.send(client.message(part))
    client.close(is_reset=draw.random() < 0.5)


def flood(draw: Draw, door: Door, name: str) -> None:
    """As much as possible at once, with commands between, and then a cut."""
    client = inside(draw, door, name)
    frame = draw.choice((*FRAMES, b"", bytes(100)))
    with contextlib.suppress(OSError):
        client.send(b"".join(client.message(frame) for _ in range(draw.randrange(FLOOD_FRAMES))))
        client.send(client.message(b"\x04PING\x00\x01", COMMAND) * 1)
        client.send(client.message(b"\x04PING\x00\x00", COMMAND))
    client.close(is_reset=draw.random() < 0.8)


Session = Callable[[Draw, Door, str], None]
STRANGERS: tuple[Session, ...] = (
    bad_greeting,
    slow_greeting,
    bad_hello,
    bad_initiate,
    unknown_key,
)
GUESTS: tuple[Session, ...] = (
    hostile_properties,
    impatient,
    bad_frames,
    commands,
    parts_without_end,
    flood,
)


def run(seed: str, door: Door) -> str:
    """One session, whose kind is drawn too; every second one has a key. Returns its name."""
    draw = Draw(seed)
    session = draw.choice(draw.choice((STRANGERS, GUESTS)))
    name = draw.choice(tuple(door.pairs))
    with contextlib.suppress(OSError):  # the coordinator may close it at any point
        session(draw, door, name)
    return session.__name__
