"""Large requests: how many may wait, and what small ones notice of them."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from coordinator.http.guard import CLIENT
from coordinator.http.large import (
    LARGE,
    MOST,
    MOST_OF_A_CLIENT,
    MOST_PARTS,
    MOST_VALUES,
    NUM_WAITING,
    Apart,
    json_response,
)
from proto.errors import BusyError, ConfigurationError


def request_of(client: str, size: int) -> Any:
    """A request whose body has come, and whose client stays."""

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    scope = {"type": "http", "headers": [], "state": {CLIENT: client}}
    request = Request(scope, receive)
    request._body = b"x" * size
    return request


def test_one_client_s_large_requests_leave_room_for_another_s() -> None:
    assert asyncio.run(_one_client_beside_others())


async def _one_client_beside_others() -> bool:
    apart, ends = Apart(), threading.Event()

    async def ask(client: str) -> bool:
        return await apart.run(request_of(client, LARGE + 1), ends.wait)

    waiting = [asyncio.create_task(ask("a")) for _ in range(MOST_OF_A_CLIENT)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await ask("a")
    others = [asyncio.create_task(ask(f"b{number}")) for number in range(MOST - MOST_OF_A_CLIENT)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await ask("c")
    # Small requests do not wait for any of them.
    assert await apart.run(request_of("a", 100), lambda: 5) == 5
    ends.set()
    assert all(await asyncio.gather(*waiting, *others))
    return await ask("a")


def test_requests_that_wait_for_a_grammar_leave_the_threads_of_others_free() -> None:
    ends = threading.Event()

    async def ask() -> int:
        apart = Apart()
        small = request_of("a", 100)
        waiting = [
            asyncio.create_task(apart.run_waiting(small, ends.wait)) for _ in range(NUM_WAITING + 9)
        ]
        await asyncio.sleep(0.05)
        try:
            return await asyncio.wait_for(apart.run(small, lambda: 5), 5.0)
        finally:
            ends.set()
            await asyncio.gather(*waiting)

    assert asyncio.run(ask()) == 5


@pytest.mark.parametrize(
    ("body", "num_looks"),
    [
        (b'"' + b"x" * (8 << 20) + b'"', 0),
        (b"[1,2" + b",3" * 100 + b"]", 0),
        (b"[1" + b",3" * LARGE + b"]", 1),
        (b'{"a":' + b"[" * LARGE, 1),
    ],
    ids=["a long text", "a small body", "many values", "many lists"],
)
def test_only_a_body_that_may_hold_many_values_is_looked_at(body: bytes, num_looks: int) -> None:
    apart, seen = Apart(), []

    def count(given: bytes, _: int) -> tuple[int, int]:
        seen.append(given)
        return 1, 1

    async def look() -> None:
        request = request_of("a", 0)
        request._body = body
        await apart.look_at(request)

    apart._bodies = SimpleNamespace(count=count)  # type: ignore[assignment]
    asyncio.run(look())
    assert seen == [body] * num_looks


@pytest.mark.parametrize("counts", [(MOST_VALUES + 1, 1), (1, MOST_PARTS + 1)])
def test_a_body_of_too_many_values_is_refused(counts: tuple[int, int]) -> None:
    apart = Apart()
    apart._bodies = SimpleNamespace(count=lambda *_: counts)  # type: ignore[assignment]
    request = request_of("a", 0)
    request._body = b"[1" + b",3" * LARGE + b"]"
    with pytest.raises(ConfigurationError, match="the body holds more than"):
        asyncio.run(apart.look_at(request))


def test_an_answer_is_written_as_starlette_writes_it() -> None:
    from starlette.responses import JSONResponse

    many = list(range(20_000))
    contents: list[dict[str, Any]] = [
        {"count": 3, "tokens": many, "strs": ["é", None], "none": [], "no": {}},
        {
            "choices": [{"logprobs": {"top": [{"a": 1}] * 900, "ids": many}}, {}],
            "by": {1: 2, 3: {}},
        },
        {},
    ]
    for content in contents:
        assert json_response(content).body == JSONResponse(content).body
