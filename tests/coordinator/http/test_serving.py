"""What bounds a server, and its end."""

import asyncio
import threading
import time

from coordinator.http.serving import Unawaited, limits_of
from coordinator.http.settings import ServeConfig


def test_the_end_of_the_event_loop_waits_for_no_thread_that_reads_a_prompt() -> None:
    may_end = threading.Event()

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(Unawaited())
        reading = loop.run_in_executor(None, may_end.wait, 50)
        await asyncio.sleep(0.05)
        reading.cancel()

    begun = time.monotonic()
    try:
        asyncio.run(ask())
        assert time.monotonic() - begun < 30
    finally:
        may_end.set()


def test_there_is_always_a_connection_that_has_no_request_in_work() -> None:
    for connections, requests in ((2, 512), (16, 16), (64, 8), (1024, 512)):
        config = ServeConfig(max_connections=connections, max_requests=requests)
        door, work = limits_of(config)
        assert 0 < work.most < door.connections.most <= connections
        assert work.most <= requests
