"""A TCP connection between two processes that can be cut for a while, or be made slow."""

import asyncio
import time
from contextlib import suppress

PIECE = 1 << 16


class Proxy:
    """Passes connections from one port of this machine on to another.

    While the link is cut nothing goes through, and connections stay open. While it is delayed each
    piece comes later, in order.
    """

    def __init__(self, port: int, to_port: int) -> None:
        self._port, self._to_port = port, to_port
        self._cut_until = 0.0  # monotonic
        self._delayed_until, self._delay_s = 0.0, 0.0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def cut(self, seconds: float) -> None:
        """Let nothing through for so long; return when the link is whole again."""
        self._cut_until = time.monotonic() + seconds
        await asyncio.sleep(seconds)

    async def delay(self, delay_s: float, seconds: float) -> None:
        """Let each piece come later, for so long; return when the link is quick again."""
        self._delay_s, self._delayed_until = delay_s, time.monotonic() + seconds
        await asyncio.sleep(seconds)

    def close(self) -> None:
        """Close all connections, and listen no more."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.create_task(self._carry(reader, back)),
            asyncio.create_task(self._carry(there, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            writer.close()
            back.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def read() -> None:
            while piece := await reader.read(PIECE):
                now = time.monotonic()
                due = now + (self._delay_s if now < self._delayed_until else 0.0)
                await pieces.put((due, piece))
            await pieces.put((0.0, b""))

        reading = asyncio.create_task(read())
        try:
            with suppress(OSError):
                while (found := await pieces.get())[1]:
                    while (left_s := max(found[0], self._cut_until) - time.monotonic()) > 0:
                        await asyncio.sleep(left_s)
                    writer.write(found[1])
                    await writer.drain()
        finally:
            reading.cancel()
