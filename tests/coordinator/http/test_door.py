"""How connections are accepted where the system has no more descriptors."""

import asyncio
import errno
import os
import socket

import pytest

from coordinator.http.door import Door


class Poor(socket.socket):
    """A listening socket of a process that has no descriptor left, for some attempts."""

    num_failures = 0
    num_attempts = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_attempts += 1
        if self.num_attempts <= self.num_failures:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Greeting(asyncio.Protocol):
    """Says a word to whoever has connected."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


async def greeted(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = await reader.read()
    writer.close()
    return said


def test_clients_wait_until_there_are_descriptors_again_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door(8)

    async def ask(bound: Poor) -> list[bytes]:
        door.open(bound, Greeting)
        try:
            async with asyncio.timeout(20):
                return await asyncio.gather(*(greeted(bound.getsockname()[1]) for _ in range(3)))
        finally:
            door.close()

    with Poor() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        bound.num_failures = 4
        assert asyncio.run(ask(bound)) == [b"hello"] * 3
        assert bound.num_attempts < 15, "it asks again and again"
    assert caplog.messages == [
        "HTTP clients wait, because no connection can be accepted (Too many open files); "
        "raise the limit of open files (ulimit -n)"
    ]


def test_a_closed_door_accepts_nobody() -> None:
    async def ask(bound: socket.socket) -> bytes:
        door = Door(8)
        door.open(bound, Greeting)
        door.close()
        door.close()
        try:
            async with asyncio.timeout(0.2):
                return await greeted(bound.getsockname()[1])
        except TimeoutError:
            return b""

    with socket.create_server(("127.0.0.1", 0)) as bound:
        assert asyncio.run(ask(bound)) == b""
