"""`python -m tests.soak [--minutes 30]`: a server with everything against it at once.

Eight clients ask for texts all the time, one after another. Meanwhile

    every minute   a prompt of 8 MB is sent, and the drafter is killed
    all the time   500 connections are open that never say anything

Each text must be the same as that of the same request before the trouble began. Each minute the
memory of every process is measured, just before the drafter is killed. At the end the figures of
the fifth minute and of the last are compared. Exit status 1: a text was another, or memory grew.

`python -m tests.soak --gaps`: eight prompts of 8 MB at once, and the longest gap between two events
of a stream beside them.
"""
# ruff: noqa: T201

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
KEY = "a-key-for-the-soak-0123456789"
NUM_CLIENTS, NUM_SILENT, NUM_PROMPTS = 8, 500, 24
NUM_TOKENS = 120
BIG_BYTES = 8_000_000  # of a body; the server takes 8 MB of 2^20 bytes each
MINUTE_S = 60.0
GROWN_S = 30.0  # after which a process has loaded its model
EARLY, MOST_GROWTH = 5, 1.05  # the minute to compare with, and how much more there may be
SERVED = re.compile(r" is served at (http://[\d.]+):(\d+)/v1")
HEADERS = {"Authorization": f"Bearer {KEY}"}


@dataclass(slots=True)
class Server:
    """A server that runs, and what is counted of it.

    texts   how many were complete and right
    wrong   requests whose text was another, or none, with what came
    """

    url: str
    port: int
    pid: int
    texts: int = 0
    wrong: list[str] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)  # to prompts of 8 MB, by status
    num_killed: int = 0

    def nodes(self) -> dict[str, int]:
        """The process ids of its nodes, by role."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                words = (folder / "cmdline").read_bytes()
                for role in ("target", "drafter"):
                    if parent == self.pid and f"{role}_node".encode() in words:
                        found[role] = int(folder.name)
        return found


@asynccontextmanager
async def served(*flags: str) -> AsyncIterator[Server]:
    """A server of the embedded pair in float32, in a process of its own."""
    command = [sys.executable, "-m", "coordinator", "serve", "--port", "0", "--dtype", "float32"]
    more = ["--max-num-seqs", str(NUM_CLIENTS), "--drafter-restarts", "6", *flags]
    process = await asyncio.create_subprocess_exec(
        *command,
        *more,
        cwd=ROOT,
        env={**os.environ, "SLIPSTREAM_API_KEY": KEY},
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert process.stderr is not None
    telling = None
    try:
        while line := (await process.stderr.readline()).decode():
            print(f"  {line.rstrip()}")
            if found := SERVED.search(line):
                break
        assert line, "the server has not started"
        telling = asyncio.create_task(_tell(process.stderr))
        yield Server(f"{found[1]}:{found[2]}", int(found[2]), process.pid)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60.0)
        if telling is not None:
            telling.cancel()


async def _tell(lines: asyncio.StreamReader) -> None:
    while line := (await lines.readline()).decode():
        print(f"  {line.rstrip()}")


def body_of(number: int) -> dict[str, Any]:
    """The request with this number."""
    prompt = f"def function_{number % NUM_PROMPTS}(values, limit):\n    "
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


async def text_of(server: Server, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Ask for a text as a stream, and return it; or what came in its place."""
    text = ""
    url = f"{server.url}/v1/completions"
    try:
        async with client.stream("POST", url, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}: {(await answer.aread())[:200]!r}"
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return f"error: {chunk['error']}"
                    text += "".join(choice["text"] for choice in chunk["choices"])
    except httpx.HTTPError as error:
        return f"no answer: {error!r}"
    return text


async def client_asks(server: Server, first: int, right: dict[int, str], until: float) -> None:
    """Ask for one text after another, and compare each."""
    async with httpx.AsyncClient(headers=HEADERS, timeout=120.0) as client:
        for number in count(first, NUM_CLIENTS):
            if time.monotonic() > until:
                return
            text = await text_of(server, client, body_of(number))
            if text == right[number % NUM_PROMPTS]:
                server.texts += 1
            else:
                server.wrong.append(f"request {number}: {text[:200]!r}")


def big_prompt(number: int) -> bytes:
    """A body with a prompt of 8 MB that no tokenizer has seen before."""
    prompt = f"{number} " + "all work and no play " * (BIG_BYTES // 21)
    return json.dumps({"prompt": prompt[: BIG_BYTES - 100], "max_tokens": 4}).encode()


async def big_prompts(server: Server, until: float) -> None:
    """Send a prompt of 8 MB every minute."""
    async with httpx.AsyncClient(headers=HEADERS, timeout=300.0) as client:
        for number in count():
            await asyncio.sleep(MINUTE_S)
            if time.monotonic() > until:
                return
            await send_big(server, client, number)


async def send_big(server: Server, client: httpx.AsyncClient, number: int) -> None:
    """Send one such prompt, and count its answer."""
    body = big_prompt(number)
    headers = {"Content-Type": "application/json"}
    try:
        answer = await client.post(f"{server.url}/v1/completions", content=body, headers=headers)
        server.answers[answer.status_code] += 1
    except httpx.HTTPError as error:
        print(f"  a prompt of 8 MB got no answer: {error!r}")
        server.answers[0] += 1


async def silent_ones(server: Server, until: float) -> None:
    """Keep many connections open that say nothing; those that are closed come again."""
    writers: list[asyncio.StreamWriter] = []
    readers: list[asyncio.StreamReader] = []
    while time.monotonic() < until:
        alive = [at for at, reader in enumerate(readers) if not reader.at_eof()]
        for writer in set(writers) - {writers[at] for at in alive}:
            writer.close()
        readers, writers = [readers[at] for at in alive], [writers[at] for at in alive]
        while len(writers) < NUM_SILENT:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            except OSError:
                break
            readers.append(reader)
            writers.append(writer)
        await asyncio.sleep(1.0)
    for writer in writers:
        writer.close()


def memory_of(pid: int) -> int:
    """The bytes that a process holds in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def age_of(pid: int) -> float:
    """The seconds since a process was started."""
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


async def drafter_dies(server: Server, until: float) -> dict[str, dict[int, float]]:
    """Each minute measure every process, and kill the drafter; return MB by process and minute."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for minute in count(1):
        await asyncio.sleep(MINUTE_S)
        pids = server.nodes()
        for name, pid in {"coordinator": server.pid, **pids}.items():
            if age_of(pid) > GROWN_S:  # a drafter that still loads is not compared
                found[name][minute] = memory_of(pid) / 1e6
        line = ", ".join(f"{name} {by.get(minute, 0.0):.0f} MB" for name, by in found.items())
        print(
            f"minute {minute}: {server.texts} texts, {len(server.wrong)} wrong; {line}", flush=True
        )
        if time.monotonic() > until:
            break
        if "drafter" in pids:
            os.kill(pids["drafter"], signal.SIGKILL)
            server.num_killed += 1
    return found


async def soak(minutes: float) -> int:
    """Run everything; return the exit status."""
    async with served() as server:
        async with httpx.AsyncClient(headers=HEADERS, timeout=120.0) as client:
            right = {
                number: await text_of(server, client, body_of(number))
                for number in range(NUM_PROMPTS)
            }
        assert all(len(text) > NUM_TOKENS / 4 for text in right.values()), right
        until = time.monotonic() + MINUTE_S * minutes - 1.0
        *_, found = await asyncio.gather(
            *(client_asks(server, number, right, until) for number in range(NUM_CLIENTS)),
            big_prompts(server, until),
            silent_ones(server, until),
            drafter_dies(server, until),
        )
    return tell(server, found)


def tell(server: Server, found: dict[str, dict[int, float]]) -> int:
    """Print what has come of it; return the exit status."""
    print(f"texts: {server.texts} right, {len(server.wrong)} wrong")
    print("\n".join(server.wrong[:20]))
    print(f"prompts of 8 MB: {dict(server.answers)} by status; drafter killed {server.num_killed}")
    has_grown = False
    for name, by_minute in found.items():
        early, last = min(m for m in by_minute if m >= min(EARLY, max(by_minute))), max(by_minute)
        growth = by_minute[last] / by_minute[early]
        has_grown |= growth > MOST_GROWTH
        print(
            f"{name}: {by_minute[early]:.0f} MB in minute {early}, {by_minute[last]:.0f} MB in "
            f"minute {last}: {growth:.3f}, highest {max(by_minute.values()):.0f} MB"
        )
    return int(has_grown or bool(server.wrong) or not server.texts)


async def gaps() -> int:
    """Send eight prompts of 8 MB beside a stream; print the longest gap between its events."""
    async with served() as server, httpx.AsyncClient(headers=HEADERS, timeout=300.0) as client:
        times: list[float] = []
        body = {**body_of(0), "max_tokens": 1900, "stream": True}

        async def stream() -> None:
            while len(times) < 2 or not sending.done():
                url = f"{server.url}/v1/completions"
                async with client.stream("POST", url, json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            times.append(time.monotonic())

        async def send() -> None:
            await asyncio.sleep(1.0)
            began = time.monotonic()
            # In a process of its own: encoding 64 MB here would stop this program, too.
            sender = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.soak.sender", server.url, KEY, cwd=ROOT
            )
            await sender.wait()
            print(f"eight prompts of 8 MB were answered after {time.monotonic() - began:.1f} s")

        before = memory_of(server.pid) / 1e6
        sending = asyncio.create_task(send())
        await stream()
        await sending
        await asyncio.sleep(5.0)
        after = memory_of(server.pid) / 1e6
    longest = max(late - early for early, late in pairwise(times))
    print(f"{len(times)} events; longest gap {longest:.2f} s; coordinator {before:.0f} MB before, ")
    print(f"{after:.0f} MB after")
    return int(longest > 0.5)


def main() -> int:
    """Exit status 1: a text was another, memory grew, or a gap was too long."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--gaps", action="store_true")
    arguments = parser.parse_args()
    return asyncio.run(gaps() if arguments.gaps else soak(arguments.minutes))


if __name__ == "__main__":
    sys.exit(main())
