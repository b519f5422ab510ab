"""The router before played servers, which break, refuse, hang and end in mid-stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from coordinator.ingress import app as module
from coordinator.ingress.app import Ingress
from coordinator.ingress.servers import Servers, State
from proto.errors import ClosedError

Json = dict[str, Any]
URLS = ("http://one", "http://two", "http://three")
LIMIT_S = 20.0
WORDS = ("a", "b\u2028c", "d\u0085e", "f")  # a text may have what others take for an end of a line


class Broken(httpx.AsyncByteStream):
    """The body of an answer that breaks off behind its parts; `hangs`: nothing more comes."""

    def __init__(self, parts: list[bytes], *, breaks: bool = False, hangs: bool = False) -> None:
        self._parts, self._breaks, self._hangs = parts, breaks, hangs

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._hangs:
            await asyncio.sleep(1000)
        if self._breaks:
            raise httpx.ReadError("broken")


def event(value: Json) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def chunks(asked: Json, name: str) -> list[bytes]:
    """What a server streams of WORDS behind what was written: a token for each word."""
    ids = asked.get("resume", {}).get("token_ids", [])
    made = []
    for number in range(len(ids), len(WORDS)):
        reason = "stop" if number + 1 == len(WORDS) else None
        choice: Json = {"index": 0, "text": WORDS[number], "finish_reason": reason}
        choice |= {"token_ids": [number], "prompt_token_ids": None if ids else [9]}
        made.append(event({"id": name, "created": 1, "choices": [choice]}))
    return [*made, b"data: [DONE]\n\n"]


Play = Callable[[httpx.Request, Json], httpx.Response]


class Stage(httpx.AsyncBaseTransport):
    """The servers, each of which plays a part; and what they were asked."""

    def __init__(self, **plays: Play) -> None:
        self.plays = {f"http://{name}": play for name, play in plays.items()}
        self.well = dict.fromkeys(self.plays, 200)
        self.asked: list[tuple[str, Json]] = []
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        url = f"{request.url.scheme}://{request.url.host}"
        if request.url.path == "/health":
            return httpx.Response(self.well.get(url, 503))
        body = json.loads(await request.aread() or b"{}")
        self.asked.append((request.url.host, body))
        self.requests.append(request)
        await asyncio.sleep(0)
        return self.plays[url](request, body)


def writes(_: httpx.Request, asked: Json) -> httpx.Response:
    return httpx.Response(200, stream=Broken(chunks(asked, "writer")))


def breaks_after(number: int) -> Play:
    def play(_: httpx.Request, asked: Json) -> httpx.Response:
        return httpx.Response(200, stream=Broken(chunks(asked, "breaker")[:number], breaks=True))

    return play


def ends_after(number: int) -> Play:
    """As a server that drains: it says so, and the stream has no mark of its end."""

    def play(_: httpx.Request, asked: Json) -> httpx.Response:
        told = event({"error": {"status": 503, "message": "the server has ended"}})
        return httpx.Response(200, stream=Broken([*chunks(asked, "ender")[:number], told]))

    return play


def refuses(status: int) -> Play:
    def play(_: httpx.Request, _asked: Json) -> httpx.Response:
        return httpx.Response(status, json={"error": {"message": f"no: {status}"}})

    return play


def not_reached(_: httpx.Request, _asked: Json) -> httpx.Response:
    raise httpx.ConnectError("refused")


def hangs(_: httpx.Request, asked: Json) -> httpx.Response:
    return httpx.Response(200, stream=Broken(chunks(asked, "hanger")[:1], hangs=True))


def run(stage: Stage, scene: Callable[[Ingress, httpx.AsyncClient], Awaitable[None]]) -> None:
    """Play a scene with a client in front of the router."""

    async def play() -> None:
        servers = Servers.at(tuple(stage.plays))
        for server in servers.all:
            servers.probed(server, is_well=True)
        ingress = Ingress(servers, wait_s=0.4, draw=lambda: 77, transport=stage)
        front = httpx.ASGITransport(app=ingress.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=front, base_url="http://router") as client:
            async with asyncio.timeout(LIMIT_S):
                await scene(ingress, client)
        assert [server.num_running for server in servers.all] == [0] * len(servers.all)

    asyncio.run(play())


async def streamed(client: httpx.AsyncClient, **body: Any) -> tuple[str, list[Json], bool]:
    """Text, events that are no chunks, and whether the mark of the end came."""
    asked = {"prompt": "p", "stream": True, **body}
    response = await client.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    lines = [one.removeprefix("data: ") for one in response.text.split("\n") if one[:6] == "data: "]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(one["text"] for told in events for one in told.get("choices", ()))
    return text, [told for told in events if "choices" not in told], lines[-1] == "[DONE]"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "PROBE_S", 0.05)


@pytest.mark.parametrize(
    "first",
    [breaks_after(2), ends_after(2), ends_after(0), breaks_after(0), not_reached, refuses(503)],
)
def test_a_stream_goes_on_at_the_next_server(first: Play) -> None:
    stage = Stage(one=first, two=writes)

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        assert await streamed(client) == ("".join(WORDS), [], True)
        assert [name for name, _ in stage.asked] == ["one", "two"]
        assert all(body["seed"] == 77 for _, body in stage.asked)

    run(stage, scene)


def test_a_server_that_keeps_answers_is_asked_again_by_the_id_that_it_gave() -> None:
    def keeps(request: httpx.Request, asked: Json) -> httpx.Response:
        named = [b"id: 1\n" + part for part in chunks(asked, "keeper")]
        is_first = "resume" not in asked
        headers = {"X-Request-ID": "given" if is_first else "another"}
        parts = named[:2] if is_first else named
        return httpx.Response(200, headers=headers, stream=Broken(parts, breaks=is_first))

    stage = Stage(one=keeps)

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        assert await streamed(client) == ("".join(WORDS), [], True)
        ids = [request.headers.get("x-request-id") for request in stage.requests]
        assert ids == [None, "given"]

    run(stage, scene)


def test_a_server_that_hangs_is_left_when_it_answers_no_questions() -> None:
    stage = Stage(one=hangs, two=writes)

    async def scene(ingress: Ingress, client: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(streamed(client))
        await asyncio.sleep(0.05)
        for _ in range(3):
            ingress.servers.probed(ingress.servers.all[0], is_well=None)
        assert await asking == ("".join(WORDS), [], True)

    run(stage, scene)


def test_a_request_that_breaks_every_server_is_given_up_and_harms_no_other() -> None:
    stage = Stage(one=breaks_after(0), two=breaks_after(0))

    async def scene(ingress: Ingress, client: httpx.AsyncClient) -> None:
        for body in ({"stream": True}, {"stream": False}):
            stage.asked.clear()
            found = await client.post("/v1/completions", json={"prompt": "p", **body})
            if body["stream"]:
                assert "3 times" in found.text
            else:
                assert (found.status_code, "3 times" in found.text) == (502, True)
            assert len(stage.asked) == module.MOST_BREAKS
        assert {server.state for server in ingress.servers.all} == {State.READY}
        assert [server.num_lives for server in ingress.servers.all] == [0, 0]

    run(stage, scene)


def test_a_stream_that_makes_a_token_at_a_time_comes_to_its_end() -> None:
    stage = Stage(one=breaks_after(1), two=breaks_after(1))

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        # The last break comes behind the last token: only the mark of the end is missing.
        assert await streamed(client) == ("".join(WORDS), [], True)

    run(stage, scene)


def test_a_stream_that_waits_for_a_server_says_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.02)
    plays = iter((breaks_after(2),))
    stage = Stage(one=lambda *asked: next(plays, refuses(503))(*asked), two=refuses(503))

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        found = await client.post("/v1/completions", json={"prompt": "p", "stream": True})
        before, _, behind = found.text.partition(": waiting for a server\n\n")
        assert WORDS[1] in before
        assert "503" in behind

    run(stage, scene)


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_a_begun_stream_waits_for_a_server_that_takes_it(status: int) -> None:
    stage = Stage(one=breaks_after(2), two=refuses(status))

    async def scene(ingress: Ingress, client: httpx.AsyncClient) -> None:
        ingress._wait_s = 5.0
        asking = asyncio.create_task(streamed(client))
        await asyncio.sleep(0.1)
        stage.plays["http://two"] = writes
        assert await asking == ("".join(WORDS), [], True)

    run(stage, scene)


def test_a_refusal_that_will_not_pass_ends_a_begun_stream() -> None:
    stage = Stage(one=breaks_after(2), two=refuses(400))

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        text, errors, is_done = await streamed(client)
        assert (text, is_done) == ("".join(WORDS[:2]), True)
        assert errors == [{"error": {"message": "no: 400", "status": 400}}]

    run(stage, scene)


def test_where_no_server_is_left_the_client_is_told_to_ask_again() -> None:
    stage = Stage(one=breaks_after(2))

    async def scene(ingress: Ingress, client: httpx.AsyncClient) -> None:
        stage.plays["http://one"] = breaks_after(2)

        async def lose() -> None:
            await asyncio.sleep(0.005)
            stage.plays["http://one"] = not_reached
            ingress.servers.broke(ingress.servers.all[0])

        stage.plays["http://one"] = hangs
        losing = asyncio.create_task(lose())
        text, errors, is_done = await streamed(client)
        await losing
        assert (text, is_done) == (WORDS[0], False)
        assert [one["error"]["status"] for one in errors] == [503]
        assert errors[0]["error"]["retry_after"] == 1
        refused = await client.post("/v1/completions", json={"prompt": "p"})
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        assert (await client.get("/health")).status_code == 503

    run(stage, scene)


def test_several_prompts_cannot_go_on_elsewhere() -> None:
    stage = Stage(one=breaks_after(2), two=writes)

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        text, errors, is_done = await streamed(client, prompt=["p", "q"])
        assert (text, is_done) == ("".join(WORDS[:2]), False)
        assert "several prompts" in errors[0]["error"]["message"]

    run(stage, scene)


def test_when_the_router_ends_its_streams_are_told() -> None:
    stage = Stage(one=hangs)

    async def scene(ingress: Ingress, client: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(streamed(client))
        await asyncio.sleep(0.05)
        ingress.end(ClosedError("the router has ended; ask again"))
        text, errors, is_done = await asking
        assert (text, is_done) == (WORDS[0], False)
        assert "the router has ended" in errors[0]["error"]["message"]

    run(stage, scene)


def test_a_client_that_goes_takes_its_request_along() -> None:
    stage = Stage(one=hangs)

    async def scene(ingress: Ingress, client: httpx.AsyncClient) -> None:
        received: list[Json] = [{"type": "http.request", "body": b'{"prompt": "p"}'}]
        gone = asyncio.Event()

        async def receive() -> Json:
            if received:
                return received.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            return

        scope: Json = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope |= {"query_string": b"", "raw_path": b"/v1/completions", "client": ("127.0.0.1", 1)}
        asking = asyncio.create_task(ingress.app(scope, receive, send))
        await asyncio.sleep(0.05)
        assert ingress.servers.all[0].num_running == 1
        gone.set()
        await asking
        assert ingress.servers.all[0].num_running == 0

    run(stage, scene)


@pytest.mark.parametrize(
    "headers", [{"Accept": "é"}, {"X-Forwarded-For": "é"}, {"X-Request-ID": "é"}]
)
def test_odd_headers_pass_and_leave_nothing_behind(headers: dict[str, str]) -> None:
    stage = Stage(one=refuses(400))

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        found = await client.post("/v1/completions", json={"prompt": "p"}, headers=raw)
        assert found.status_code == 400
        found = await client.get("/v1/%00", headers=raw)
        assert found.status_code == 400
        assert stage.requests[-1].url.raw_path == b"/v1/%00"

    run(stage, scene)


def test_a_server_gets_the_address_of_the_client_and_none_that_it_makes_up() -> None:
    stage = Stage(one=refuses(400))

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        sent = {"X-Forwarded-For": "10.9.9.9", "Authorization": "Bearer k", "X-Request-ID": "r"}
        sent |= {"Origin": "http://router", "Sec-Fetch-Site": "same-origin"}
        await client.post("/v1/completions", json={"prompt": "p"}, headers=sent)
        got = stage.requests[-1].headers
        assert not {"origin", "sec-fetch-site"} & set(got)
        assert got.get_list("x-forwarded-for") == ["127.0.0.1"]
        assert (got["authorization"], got["x-request-id"]) == ("Bearer k", "r")

    run(stage, scene)


def test_whole_answers_and_what_is_no_json_pass_as_they_are() -> None:
    said = {"id": "x", "choices": []}
    stage = Stage(one=lambda _request, _asked: httpx.Response(200, json=said, headers={"X-A": "b"}))

    async def scene(_: Ingress, client: httpx.AsyncClient) -> None:
        found = await client.post("/v1/chat/completions", json={"messages": []})
        assert (found.json(), found.headers["x-a"]) == (said, "b")
        assert stage.asked[-1][1]["seed"] == 77
        await client.post("/v1/completions", json={"prompt": "p", "n": 1.5, "stream": True})
        assert stage.asked[-1][1] == {"prompt": "p", "n": 1.5, "stream": True}
        await client.post("/tokenize", json={"prompt": "p"})
        assert stage.asked[-1][1] == {"prompt": "p"}

    run(stage, scene)
