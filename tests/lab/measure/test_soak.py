"""The long load notices what is wrong, on a server that is made up."""

import asyncio
import json
import os
import time
from collections import Counter

import httpx
import pytest

from lab.measure.soak import Soak, has_grown, main, memory_kib, processes


class MadeUpServer(httpx.AsyncBaseTransport):
    """Answers as the server does; `wrong` is the one thing that it does wrong."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.num_asked = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        self.num_asked += 1
        is_bad = body["max_tokens"] < 1 or body.get("temperature") == "hot"
        if is_bad or body.get("prompt") == [10**9]:
            return httpx.Response(200 if self.wrong == "takes all" else 400, json={})
        if self.wrong == "fails" and self.num_asked % 3 == 0:
            return httpx.Response(500, json={})
        if "messages" in body:
            return httpx.Response(200, json={"choices": [{"message": {"content": "hello"}}]})
        text = f"{body['prompt']} {body['max_tokens']}"
        if self.wrong == "differs" and self.num_asked % 2:
            text += "!"
        choices = [{"text": text}] * (1 if self.wrong == "one" else body.get("n", 1))
        if body.get("stream"):
            return httpx.Response(200, text=f"data: {json.dumps({'choices': choices})}\n\n")
        return httpx.Response(200, json={"choices": choices})


def seen_of(wrong: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Counter[str]]:
    """Let clients ask a made-up server without pauses; what went wrong, and what was seen."""
    sleep = asyncio.sleep
    monkeypatch.setattr("lab.measure.soak.asyncio.sleep", lambda _: sleep(0))
    soak = Soak("http://server", ["a", "b"], MadeUpServer(wrong))
    asyncio.run(soak.client(1, time.monotonic() + 0.3))
    return soak.num_wrong, soak.seen


def test_a_sound_server_is_asked_for_all_kinds_of_things(monkeypatch: pytest.MonkeyPatch) -> None:
    num_wrong, seen = seen_of("", monkeypatch)
    assert num_wrong == 0
    assert set(seen) == {"greedy", "streamed", "leaving", "several", "bad", "chat"}


@pytest.mark.parametrize("wrong", ["takes all", "fails", "differs", "one"])
def test_what_is_wrong_is_counted(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_wrong, _ = seen_of(wrong, monkeypatch)
    assert num_wrong > 0


def test_memory_that_grows_after_it_has_settled_is_noticed() -> None:
    steady = [50_000, *[400_000] * 20]
    assert not has_grown(steady)
    assert not has_grown([*steady, 410_000])
    assert has_grown([*steady, 420_000])
    assert has_grown([*steady, 0])


def test_the_memory_of_a_process_is_found() -> None:
    assert os.getpid() in processes(os.getpid())
    assert memory_kib(os.getpid()) > 1000
    assert memory_kib(2**30) == 0


def test_a_process_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["soak", "--pid", str(2**30), "--minutes", "0"])
    assert main() == 1
    assert "there is no process" in capsys.readouterr().err
