"""The load measurement counts what clients get, on a server that is made up."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from lab.measure.serving import Load, measure

LENGTH = 4


class MadeUpServer(httpx.AsyncBaseTransport):
    """Answers each request with `LENGTH` chunks of one token; what it does wrong is a flag."""

    def __init__(
        self, *, refuses: bool = False, breaks: bool = False, differs: bool = False
    ) -> None:
        self.refuses, self.breaks, self.differs = refuses, breaks, differs
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.bodies.append(body)
        if self.refuses:
            return httpx.Response(429, json={"error": {"message": "full"}})
        return httpx.Response(200, stream=_Chunks(self._chunks(body)))

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        is_plain = not body["speculative"]["enabled"]
        for count in range(1, LENGTH + 1):
            await asyncio.sleep(0.002)
            if self.breaks and count == LENGTH:
                yield b'data: {"error": {"message": "broken"}}\n\n'
                return
            text = f"{body['seed']}{'x' if is_plain and self.differs else ''} "
            chunk = {"choices": [{"text": text}], "usage": {"completion_tokens": count}}
            yield f"data: {json.dumps(chunk)}\n\n".encode()
        yield b"data: [DONE]\n\n"


class _Chunks(httpx.AsyncByteStream):
    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield chunk


def load_of(server: MadeUpServer) -> Load:
    return Load("http://server", ["a", "b", "c"], 0.8, LENGTH, server)


def test_both_kinds_ask_for_the_same_texts_and_every_token_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = MadeUpServer()
    load = load_of(server)
    assert asyncio.run(measure(load, 3, 0.6)) == 0
    asked: dict[bool, set[tuple[str, int]]] = {True: set(), False: set()}
    for body in server.bodies:
        asked[body["speculative"]["enabled"]].add((body["prompt"], body["seed"]))
    assert len(asked[True] & asked[False]) > 10
    num_both, num_different = load.num_different
    assert num_both > 10
    assert num_different == 0
    speculative, plain, ratio = capsys.readouterr().out.splitlines()
    for line, kind in ((speculative, "speculative"), (plain, "plain")):
        clients, said, rate, *_, num_texts, num_errors = line.split()
        assert (clients, said, num_errors) == ("3", kind, "0")
        # In each of three slices each of three clients adds up to a text, or leaves it out.
        assert abs(int(num_texts) * LENGTH - float(rate) * 0.3) <= 9 * LENGTH
    assert "speculative / plain" in ratio


def test_a_slice_counts_the_tokens_of_its_own_time_alone() -> None:
    made = asyncio.run(load_of(MadeUpServer()).slice(2, 0.0, is_plain=False, first=0))
    assert (made.num_texts, made.num_tokens, made.rate) == (0, 0, 0.0)
    made = asyncio.run(load_of(MadeUpServer()).slice(1, 0.004, is_plain=False, first=0))
    assert made.num_texts == 1
    assert made.num_tokens < LENGTH
    assert len(made.first_s) + len(made.between_s) == made.num_tokens


@pytest.mark.parametrize("wrong", [{"refuses": True}, {"breaks": True}])
def test_requests_that_fail_are_counted(wrong: dict[str, bool]) -> None:
    made = asyncio.run(load_of(MadeUpServer(**wrong)).slice(2, 0.05, is_plain=True, first=0))
    assert made.num_errors > 0
    assert made.num_texts == 0


def test_texts_that_differ_are_found() -> None:
    load = load_of(MadeUpServer(differs=True))
    asyncio.run(load.slice(2, 0.05, is_plain=True, first=0))
    asyncio.run(load.slice(2, 0.05, is_plain=False, first=0))
    num_both, num_different = load.num_different
    assert num_both == num_different > 0
