"""The HTTP server when clients go at any moment, and when a drafter dies under load."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from tests.process.behaviours import CONFIG
from tests.process.served import LIMIT_S, Served, serving

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROMPT = "class Stack:\n    "
NUM_LEAVING, AT_ONCE = 1000, 40
NUM_BEFORE = 2500  # until then caches grow, of texts that others may begin like


@pytest.fixture
def server(embedded: Pair) -> Iterator[Served]:
    with serving(embedded, max_queue=2000) as served:
        yield served


def memory_of(pid: int) -> int:
    """Bytes of a process that are in memory."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_clients_that_go_leave_nothing_behind(server: Served) -> None:
    draw = random.Random(7)

    async def leave(client: httpx.AsyncClient, number: int, slots: asyncio.Semaphore) -> None:
        body = {
            "prompt": PROMPT,
            "max_tokens": draw.choice((5, 60, 300)),
            "n": draw.choice((1, 1, 3)),
            "seed": number,
            "stream": draw.random() < 0.7,
            "ignore_eos": True,
        }
        async with slots:
            try:
                async with asyncio.timeout(draw.expovariate(1 / 0.08)):
                    await client.post("/v1/completions", json=body)
            except TimeoutError:
                pass

    async def all_of_them(number: int) -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as client:
            await asyncio.gather(*(leave(client, one, slots) for one in range(number)))

    pids = (os.getpid(), *server.llm.pair.pids().values())
    asyncio.run(all_of_them(NUM_BEFORE))
    server.wait_until_idle()
    before = [memory_of(pid) for pid in pids]
    asyncio.run(all_of_them(NUM_LEAVING))
    server.wait_until_idle()
    last = server.complete(PROMPT, max_tokens=4, ignore_eos=True)
    assert last["usage"]["completion_tokens"] == 4
    assert server.llm.pair.service.status()["queued"] == 0
    for pid, bytes_before in zip(pids, before, strict=True):
        assert memory_of(pid) < 1.02 * bytes_before


def test_a_drafter_that_dies_under_load_fails_no_request_and_changes_no_text() -> None:
    config = CONFIG.model_copy(update={"drafter_restarts": 3})
    assert isinstance(config, PairConfig)

    def ask(served: Served, seed: int) -> str:
        answer = served.complete(PROMPT, max_tokens=60, temperature=0.8, seed=seed)
        return str(answer["choices"][0]["text"])

    with Pair(config) as pair, serving(pair) as served, ThreadPoolExecutor(8) as clients:
        wanted = list(clients.map(lambda seed: ask(served, seed), range(24)))
        asked = [clients.submit(ask, served, seed) for seed in range(24)]
        asked[4].result(LIMIT_S)
        os.kill(pair.pids()["drafter"], signal.SIGKILL)
        assert [one.result(LIMIT_S) for one in asked] == wanted
        served.wait_until_idle()
