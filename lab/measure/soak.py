"""Mixed load on a running server for a long time: does its memory stay flat, is every text right?

    python -m coordinator serve --port 8000            # in another terminal
    python -m lab.measure.soak --url http://127.0.0.1:8000 --pid PID --minutes 60

Clients complete, chat, stream, ask for logprobs and for several texts, send what is no request, and
leave in the middle of a text. Every greedy text is compared with the first one of the same prompt.
The memory of the server and of the nodes that it has started is printed every minute. Status 1: a
request failed, a text differs, or a process has grown (see `GROWN`). Linux only.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from lab.measure.serving import PROMPTS

LIMIT_S = 120.0  # for any answer
SETTLED = 0.25  # share of the time after which memory should be flat
# Factor and KiB by which a process may be larger at the end than when settled.
GROWN = (1.02, 8 << 10)


def processes(pid: int) -> dict[int, str]:
    """Return the process and its children, with their names; those that have ended are left out."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
        except (OSError, IndexError):
            continue
        if pid in (int(folder.name), parent):
            found[int(folder.name)] = words[2] if len(words) > 2 else words[0]
    return found


def memory_kib(pid: int) -> int:
    """Return the resident memory of a process in KiB; 0: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def has_grown(sizes: Sequence[int]) -> bool:
    """Return True if a process has more memory at the end than when it had settled, in KiB."""
    settled, end = sizes[int(SETTLED * len(sizes))], sizes[-1]
    factor, slack = GROWN
    return end > settled * factor + slack or end == 0


class Soak:
    """Clients that ask a server for all kinds of things; `seen` counts them, and what went wrong.

    texts  greedy texts by prompt and length, as they were written first
    """

    def __init__(
        self, url: str, prompts: Sequence[str], transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._url = url
        self._prompts = prompts
        self._transport = transport
        self.seen: Counter[str] = Counter()
        self.texts: dict[tuple[str, int], str] = {}

    @property
    def num_wrong(self) -> int:
        """Return the number of failed requests and of texts that differ."""
        return sum(number for name, number in self.seen.items() if name.startswith("WRONG"))

    async def client(self, seed: int, until: float) -> None:
        """Ask for one thing after another until `until` (monotonic seconds)."""
        chance = random.Random(seed)
        kinds = (self._greedy, self._streamed, self._leaving, self._several, self._bad, self._chat)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=LIMIT_S, transport=self._transport
        ) as client:
            while time.monotonic() < until:
                ask = chance.choice(kinds)
                try:
                    await ask(client, chance)
                    self.seen[ask.__name__[1:]] += 1
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.seen[f"WRONG {ask.__name__[1:]}: {type(error).__name__}"] += 1
                await asyncio.sleep(chance.expovariate(2.0))

    def _body(self, chance: random.Random, **more: Any) -> dict[str, Any]:
        prompt = chance.choice(self._prompts)
        return {"prompt": prompt, "max_tokens": chance.choice((4, 24, 64)), **more}

    async def _greedy(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body = self._body(chance, temperature=0)
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        self._compare(body, answer.json()["choices"][0]["text"])

    async def _streamed(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body = self._body(chance, temperature=0, stream=True, logprobs=2)
        parts: list[str] = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    parts += (one["text"] for one in json.loads(line[6:])["choices"])
        self._compare(body, "".join(parts))

    async def _leaving(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body = self._body(chance, temperature=1, stream=True, max_tokens=400, ignore_eos=True)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            left = chance.randrange(12)
            async for _ in answer.aiter_lines():
                left -= 1
                if left < 0:
                    return

    async def _several(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        body = self._body(chance, temperature=0.9, n=3, seed=chance.randrange(9))
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        if len(answer.json()["choices"]) != 3:
            raise ValueError("there are not three texts")

    async def _bad(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        wrong = chance.choice(({"max_tokens": -1}, {"temperature": "hot"}, {"prompt": [10**9]}))
        answer = await client.post("/v1/completions", json={**self._body(chance), **wrong})
        if answer.status_code != 400:
            raise ValueError(f"status {answer.status_code} for a request that is none")

    async def _chat(self, client: httpx.AsyncClient, chance: random.Random) -> None:
        said = [{"role": "user", "content": chance.choice(self._prompts)}]
        answer = await client.post(
            "/v1/chat/completions", json={"messages": said, "max_tokens": 16, "temperature": 0.5}
        )
        answer.raise_for_status()
        answer.json()["choices"][0]["message"]["content"].encode()

    def _compare(self, body: dict[str, Any], text: str) -> None:
        key = body["prompt"], body["max_tokens"]
        if self.texts.setdefault(key, text) != text:
            self.seen["WRONG a greedy text differs from the first one"] += 1


async def _watch(soak: Soak, pid: int, num_clients: int, minutes: float) -> dict[str, list[int]]:
    """Let the clients ask for so long; return the memory of each process in KiB, by minute."""
    end = time.monotonic() + 60 * minutes
    clients = [asyncio.create_task(soak.client(number, end)) for number in range(num_clients)]
    names = processes(pid)
    sizes: dict[str, list[int]] = {f"{name} ({one})": [] for one, name in names.items()}
    began = time.monotonic()
    while time.monotonic() < end:
        await asyncio.sleep(min(60.0, max(0.0, end - time.monotonic())))
        for one, name in names.items():
            sizes[f"{name} ({one})"].append(memory_kib(one))
        now = ", ".join(f"{name} {kib[-1] / 1024:.1f}" for name, kib in sizes.items())
        asked = soak.seen.total()
        print(
            f"{(time.monotonic() - began) / 60:5.1f} min  {asked} requests; MiB: {now}", flush=True
        )
    await asyncio.gather(*clients)
    return sizes


def main() -> int:
    """Run the load and print what became of it; return 1 if anything was wrong, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="process id of the server")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=6)
    given = parser.parse_args()
    if given.pid not in processes(given.pid):
        print(f"error: there is no process {given.pid}; give that of the server", file=sys.stderr)
        return 1
    lines = PROMPTS.read_text("utf-8").splitlines()
    soak = Soak(given.url, [json.loads(line)["prompt"] for line in lines if line.strip()][:40])
    sizes = asyncio.run(_watch(soak, given.pid, given.clients, given.minutes))
    for name, number in sorted(soak.seen.items()):
        print(f"  {name:40} {number}")
    grown = [name for name, kib in sizes.items() if has_grown(kib)]
    print(f"grown: {', '.join(grown)}" if grown else "no process has grown")
    return int(bool(grown) or soak.num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
