"""Servers behind a router are killed and stopped in mid-stream: clients read undisturbed texts."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from tests.process.behaviours import MAX_MODEL_LEN
from tests.process.patience import wait_for
from tests.process.twelve_streams import AT_ONCE, LIMIT_S, PROMPT, REQUESTS, Heard, ask

pytestmark = [pytest.mark.process, pytest.mark.long]


@dataclass
class Program:
    """A program of the command line that runs until the test ends."""

    command: tuple[str, ...]
    said: list[str] = field(default_factory=list)
    process: "subprocess.Popen[str] | None" = None

    def start(self, limit_s: float = LIMIT_S) -> str:
        """Start it, and return the URL that it says it is at."""
        self.said.clear()
        self.process = subprocess.Popen(
            (sys.executable, "-m", "coordinator", *self.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True).start()
        assert wait_for(lambda: self.url or self.process.poll() is not None, limit_s), self.said
        assert self.url, self.said
        return self.url

    def _listen(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.said.append(line)

    @property
    def url(self) -> str:
        """Where it listens; empty: it has not said so."""
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1", "".join(self.said))
        return found[1] if found else ""

    def signal(self, number: int) -> None:
        """Send its process a signal."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """End it, whatever its state."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


@dataclass
class Fleet:
    """Two servers and what is in front of them."""

    servers: tuple[Program, Program]
    router: Program
    url: str

    def figures(self) -> dict[str, float]:
        """What the router tells of itself."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("slipstream_router_"): float(value) for name, value in pairs}

    def busiest(self) -> Program:
        """The server with the most requests in work."""
        found = self.figures()
        return max(self.servers, key=lambda one: found[f'requests_running{{server="{one.url}"}}'])


@contextmanager
def running(*command: str) -> Iterator[Program]:
    program = Program(command)
    try:
        yield program
    finally:
        program.end()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    serve = (
        *("serve", "--target", "toy", "--drafter", "toy", "--port", "0"),
        *("--dtype", "float32", "--drafter-dtype", "float32"),
        *("--max-model-len", str(MAX_MODEL_LEN)),
    )
    with ExitStack() as stack:
        first, second = (stack.enter_context(running(*serve)) for _ in range(2))
        urls = [first.start(), second.start()]
        router = stack.enter_context(running("router", *urls, "--port", "0"))
        url = router.start()
        made = Fleet((first, second), router, url)
        assert wait_for(lambda: made.figures()["servers_ready"] == 2, LIMIT_S)
        yield made


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[Heard]:
    """What one of the servers writes when nobody disturbs it."""
    return [ask(fleet.servers[0].url, path, body) for path, body in REQUESTS]


def disturbed(fleet: Fleet, number: int) -> tuple[list[Heard], Program]:
    """What clients read while the busiest server gets a signal; and that server."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(AT_ONCE) as clients:
        asked = [clients.submit(ask, fleet.url, *one, begun) for one in REQUESTS]
        for _ in range(3):
            assert begun.acquire(timeout=LIMIT_S)
        hit = fleet.busiest()
        hit.signal(number)
        return [one.result(LIMIT_S) for one in asked], hit


def test_a_router_changes_nothing(fleet: Fleet, undisturbed: list[Heard]) -> None:
    for (path, body), wanted in zip(REQUESTS, undisturbed, strict=True):
        ask(fleet.url, path, body).check(wanted)
        whole = httpx.post(f"{fleet.url}/v1/{path}", json=body, timeout=LIMIT_S).json()
        texts = {
            one["index"]: one["text"] if "text" in one else one["message"]["content"]
            for one in whole["choices"]
        }
        assert texts == dict(wanted.text)
    assert httpx.get(f"{fleet.url}/v1/models").json()["data"]
    assert "<html" in httpx.get(f"{fleet.url}/").text
    # As the page asks, in a browser.
    own = {"Origin": fleet.url, "Sec-Fetch-Site": "same-origin"}
    body = {"prompt": PROMPT, "max_tokens": 4}
    asked = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=own, timeout=LIMIT_S)
    assert asked.status_code == 200
    other = {"Origin": "http://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
    refused = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=other, timeout=LIMIT_S)
    assert refused.status_code == 403
    refused = httpx.post(f"{fleet.url}/v1/completions", json={"prompt": PROMPT, "n": -1})
    assert refused.status_code == 400
    broken = {"Content-Type": "application/json"}
    refused = httpx.post(f"{fleet.url}/v1/completions", content=b"{", headers=broken)
    assert refused.status_code == 400


def test_where_a_server_is_stopped_its_streams_go_on_elsewhere(
    fleet: Fleet, undisturbed: list[Heard]
) -> None:
    before = fleet.figures()["moved_streams"]
    found, hit = disturbed(fleet, signal.SIGSTOP)
    for heard, wanted in zip(found, undisturbed, strict=True):
        heard.check(wanted)
    assert fleet.figures()["moved_streams"] > before
    assert fleet.figures()["servers_ready"] == 1
    hit.signal(signal.SIGCONT)
    assert wait_for(lambda: fleet.figures()["servers_ready"] == 2, LIMIT_S)


def test_where_a_server_is_killed_its_streams_go_on_elsewhere(
    fleet: Fleet, undisturbed: list[Heard]
) -> None:
    before = fleet.figures()["moved_streams"]
    found, hit = disturbed(fleet, signal.SIGKILL)
    for heard, wanted in zip(found, undisturbed, strict=True):
        heard.check(wanted)
    assert fleet.figures()["moved_streams"] > before
    (left,) = [one for one in fleet.servers if one is not hit]
    # The last one drains: what is in work there ends, new requests wait, and then are refused.
    with running("router", left.url, "--port", "0", "--wait-s", "0.5") as alone:
        url = alone.start()
        assert wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, LIMIT_S)
        left.signal(signal.SIGTERM)
        assert wait_for(lambda: httpx.get(f"{url}/health").status_code == 503, LIMIT_S)
        body = {"prompt": PROMPT, "max_tokens": 4}
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
    assert "no server is ready" in refused.text
