"""Kills, stops and cuts off the processes of a cluster while clients read: is every text the same?

    python -m lab.measure.chaos --seconds 300 --every 20 --seed 1

It starts a coordinator with a journal, two targets and two drafters on this machine, and eight
clients, which ask for completions, chats, JSON by a schema, several texts, log-probabilities and
penalties. First each kind of request is answered undisturbed. Then, by a schedule that the seed
decides, a process is killed or stopped, or the link of a node is cut or delayed. The next fault
comes when the last one is repaired; one in twenty comes beside another. A client whose stream
breaks resumes it by the id of its request. Status 1: a text or its tokens differ from the
undisturbed answer, or a request failed. What the processes say is in the folder that is named.
"""

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from lab.measure.cut_links import Proxy
from proto.installation import MODELS

START_LIMIT_S = 300.0
REPAIR_LIMIT_S = 240.0
READ_LIMIT_S = 25.0  # without a byte, after which a client connects again
REQUEST_LIMIT_S = 480.0  # for a whole answer, however often it was resumed
BEGUN_S = 2.0  # until the first fault: then all streams have begun
RESTART_S = 1.0  # after a kill, until the process is started again
LASTS_S = (2.0, 8.0, 18.0)  # how long a process is stopped, or a link is cut or slow
SHARE_BESIDE = 1 / 20  # of the faults that come beside another one
LOGPROBS_APART = 1e-3
SERVES = "serves a coordinator"  # what a node says

CHAT = {"messages": [{"role": "user", "content": "Write a loop."}]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
PROMPT = {"prompt": "def read_lines(path):\n    "}
SAMPLED = {"temperature": 0.8, "max_tokens": 120, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {**PROMPT, **SAMPLED, "temperature": 0.0}),
    ("completions", {**PROMPT, **SAMPLED, "seed": 1, "presence_penalty": 0.9}),
    ("completions", {**PROMPT, **SAMPLED, "seed": 2, "n": 2, "max_tokens": 80}),
    ("completions", {**PROMPT, **SAMPLED, "seed": 3, "logprobs": 2}),
    ("chat/completions", {**CHAT, **SAMPLED, "seed": 4}),
    ("chat/completions", {**CHAT, "temperature": 0.8, "seed": 5, "response_format": FORM}),
    ("completions", {**PROMPT, **SAMPLED, "seed": 6, "frequency_penalty": 0.7}),
    ("chat/completions", {**CHAT, **SAMPLED, "seed": 7, "n": 2, "max_tokens": 80}),
]


# -- processes -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Program:
    """A process that is started again and again; what it says is appended to a file."""

    name: str
    command: Sequence[str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def num_served(self) -> int:
        """Return how often a node has said that it works for a coordinator."""
        return self.log.read_text(errors="replace").count(SERVES)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it at once, whatever its state; return when it has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Cluster:
    """A coordinator with a journal, and nodes that were started by hand, each behind a link."""

    def __init__(self, folder: Path, *, pass_ms: float, num_each: int = 2) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        listens = free_port()
        port = self.url.rpartition(":")[2]
        target, drafter = str(MODELS / "target"), str(MODELS / "drafter")
        models = ("--target", target, "--drafter", drafter)
        remote = ("--nodes", "remote", "--listen", f"tcp://127.0.0.1:{listens}")
        journal = ("--journal", str(folder / "journal"), "--max-num-seqs", "8")
        limits = ("--port", port, "--start-timeout-s", f"{START_LIMIT_S:g}")
        words = ("coordinator", "serve", *models, *remote, *journal, *limits)
        self.coordinator = Program("coordinator", words, folder / "coordinator")
        self.nodes: list[Program] = []
        self.links: dict[str, Proxy] = {}
        simulated = {"target": pass_ms, "drafter": pass_ms / 10}
        for role, model in (("target", target), ("drafter", drafter)):
            for number in range(1, num_each + 1):
                name, place = f"{role}-{number}", free_port()
                self.links[name] = Proxy(place, listens)
                node = (f"{role}_node", "--join", f"tcp://127.0.0.1:{place}", "--name", name)
                of_model = ("--model", model, "--dtype", "float32", "--max-num-seqs", "8")
                costs = ("--simulate-ms", str(simulated[role]), "--max-model-len", "384")
                self.nodes.append(Program(name, (*node, *of_model, *costs), folder / name))

    @property
    def programs(self) -> list[Program]:
        """Return all of them."""
        return [self.coordinator, *self.nodes]

    async def start(self) -> None:
        """Start everything; return when the coordinator takes requests and all nodes work."""
        for link in self.links.values():
            await link.open()
        for program in self.programs:
            program.start()
        await self.wait_until_well(START_LIMIT_S)

    async def serves_again(self, node: Program, num_before: int, limit_s: float) -> None:
        """Return when a node has said once more that it works. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            while node.num_served <= num_before:
                await asyncio.sleep(0.2)

    async def wait_until_well(self, limit_s: float) -> None:
        """Return when all nodes are there. Raises TimeoutError."""
        async with asyncio.timeout(limit_s), httpx.AsyncClient(timeout=2.0) as client:
            while not await self._is_well(client):
                await asyncio.sleep(0.2)

    async def _is_well(self, client: httpx.AsyncClient) -> bool:
        try:
            state = (await client.get(f"{self.url}/status")).json()
        except (httpx.HTTPError, ValueError):
            return False
        ready = [node for node in state.get("nodes", ()) if node["health"] == "ready"]
        return len(ready) == len(self.nodes)

    def close(self) -> None:
        """End everything."""
        for program in self.programs:
            program.kill()
        for link in self.links.values():
            link.close()


def free_port() -> int:
    """Return the number of a port at which nobody listens now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        number: int = made.getsockname()[1]
        return number


# -- clients ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """What a client has read, by choice.

    arrivals  when parts came (monotonic)
    """

    ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    num_resumed: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Add a chunk."""
        self.arrivals.append(time.monotonic())
        for choice in event["choices"]:
            index = choice["index"]
            self.ids[index] += choice.get("token_ids") or []
            said = choice["text"] if "text" in choice else choice["delta"].get("content")
            self.text[index] += said or ""
            if probs := choice.get("logprobs"):
                self.logprobs += probs["token_logprobs"]
            if (reason := choice["finish_reason"]) is not None:
                assert index not in self.reasons, "a choice ends twice"
                self.reasons[index] = reason

    def differs(self, other: "Answer") -> str:
        """Return in what this answer differs from another one; "": in nothing."""
        for name in ("ids", "text", "reasons"):
            if getattr(self, name) != getattr(other, name):
                return name
        pairs = list(zip(self.logprobs, other.logprobs, strict=False))
        are_near = all(abs(one - two) < LOGPROBS_APART for one, two in pairs)
        is_alike = len(self.logprobs) == len(other.logprobs) and are_near
        return "" if is_alike else "logprobs"


class BrokenOffError(Exception):
    """A stream ended before its answer was complete."""


async def read_answer(url: str, name: str, path: str, body: dict[str, Any]) -> Answer:
    """Return the answer to a request, however often its stream breaks. Raises TimeoutError."""
    answer, last_id = Answer(), ""
    limits = httpx.Timeout(READ_LIMIT_S, connect=2.0)
    wanted = {**body, "stream": True, "return_token_ids": True}
    async with asyncio.timeout(REQUEST_LIMIT_S):
        while True:
            headers = {"X-Request-ID": name}
            if last_id:
                headers["Last-Event-ID"] = last_id
            try:
                # A connection of its own: what a stopped server has accepted is not used again.
                async with (
                    httpx.AsyncClient(base_url=url, timeout=limits) as client,
                    client.stream("POST", f"/v1/{path}", json=wanted, headers=headers) as got,
                ):
                    if got.status_code in (429, 503):
                        raise BrokenOffError
                    assert got.status_code == 200, (await got.aread()).decode()
                    async for line in got.aiter_lines():
                        if line.startswith("id: "):
                            last_id = line.removeprefix("id: ")
                        elif line == "data: [DONE]":
                            return answer
                        elif line.startswith("data: "):
                            event = json.loads(line.removeprefix("data: "))
                            if "choices" not in event:
                                raise BrokenOffError
                            assert "error" not in event, event["error"]
                            answer.add(event)
                raise BrokenOffError
            except (httpx.HTTPError, BrokenOffError):
                answer.num_resumed += bool(answer.arrivals)
                await asyncio.sleep(0.2)


class Clients:
    """Clients that ask one request after another, and compare each answer."""

    def __init__(self, url: str, number: int) -> None:
        self.url = url
        self.number = number
        self.expected: list[Answer] = []
        self.answers: list[Answer] = []
        self.wrong: list[str] = []
        self._is_over = False

    async def learn(self) -> None:
        """Have each kind of request answered undisturbed."""
        for number, (path, body) in enumerate(REQUESTS):
            self.expected.append(await read_answer(self.url, f"alone-{number}", path, body))

    async def run(self) -> None:
        """Ask until `end` is called; return when the last answers are complete."""
        await asyncio.gather(*map(self._ask, range(self.number)))

    def end(self) -> None:
        """Ask for nothing new."""
        self._is_over = True

    async def _ask(self, client: int) -> None:
        number = client
        while not self._is_over:
            kind = number % len(REQUESTS)
            path, body = REQUESTS[kind]
            name = f"chaos-{client}-{number}"
            try:
                answer = await read_answer(self.url, name, path, body)
            except (TimeoutError, AssertionError) as error:
                self.wrong.append(f"{name}: {type(error).__name__} {error}")
            else:
                self.answers.append(answer)
                if why := answer.differs(self.expected[kind]):
                    self.wrong.append(f"{name}: another answer than before: {why}")
            number += 1


# -- faults ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Happened:
    """A fault, and when it was (monotonic)."""

    kind: str
    began: float
    repaired: float = 0.0


class Chaos:
    """Lets faults happen to a cluster, as a seed decides."""

    def __init__(self, cluster: Cluster, seed: int, say: Callable[[str], object]) -> None:
        self.happened: list[Happened] = []
        self._cluster = cluster
        self._random = Random(seed)
        self._say = say
        self._again: list[str] = []  # those that are left of a round of all kinds

    def _drawn(self) -> tuple[str, str]:
        """Return what happens next, and to which role: each kind once before any comes again."""
        if not self._again:
            roles = ("target", "drafter", "coordinator")
            self._again = [f"{what} {role}" for what in ("kill", "stop") for role in roles]
            self._again += [f"{what} {role}" for what in ("cut", "delay") for role in roles[:2]]
            self._random.shuffle(self._again)
        what, role = self._again.pop().split()
        return what, role

    async def run(self, seconds: float, every_s: float, most: int) -> None:
        """Let faults happen for so long, or so many."""
        until = time.monotonic() + seconds
        await asyncio.sleep(min(every_s, BEGUN_S))
        while time.monotonic() < until and len(self.happened) < most:
            begun = time.monotonic()
            faults = [self._one()]
            if self._random.random() < SHARE_BESIDE:
                faults.append(self._one())
            await asyncio.gather(*faults)
            left_s = min(begun + every_s, until) - time.monotonic()
            await asyncio.sleep(max(0.0, left_s))

    async def _one(self) -> None:
        what, role = self._drawn()
        programs = [one for one in self._cluster.programs if one.name.startswith(role)]
        program = self._random.choice(programs)
        seconds = self._random.choice(LASTS_S)
        fault = Happened(f"{what} {role}", time.monotonic())
        self.happened.append(fault)
        match what:
            case "kill":
                num_before = program.num_served
                program.kill()
                await asyncio.sleep(RESTART_S)
                program.start()
                if program is not self._cluster.coordinator:
                    await self._cluster.serves_again(program, num_before, REPAIR_LIMIT_S)
            case "stop":
                program.signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                program.signal(signal.SIGCONT)
            case "cut":
                await self._cluster.links[program.name].cut(seconds)
            case "delay":
                await self._cluster.links[program.name].delay(0.1, seconds)
        await self._cluster.wait_until_well(REPAIR_LIMIT_S)
        fault.repaired = time.monotonic()
        lasted_s = fault.repaired - fault.began
        self._say(f"{what} {program.name}: repaired after {lasted_s:.1f} s")


def pauses(answers: Sequence[Answer], happened: Sequence[Happened]) -> dict[str, float]:
    """Return the longest time without a token in any stream, by the kind of fault beside it."""
    longest: dict[str, float] = {}
    for answer in answers:
        for before, after in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            for fault in happened:
                if before < fault.repaired and after > fault.began:
                    longest[fault.kind] = max(longest.get(fault.kind, 0.0), after - before)
    return longest


def opened_again(folder: Path) -> int:
    """Return how many texts were opened again, as the coordinator and its nodes have said."""
    said = (folder / "coordinator").read_text(errors="replace")
    moved = re.findall(r"goes on with (\d+) text", said)
    taken_up = re.findall(r"^(\d+) answers? go(?:es)? on", said, re.MULTILINE)
    return sum(map(int, (*moved, *taken_up)))


async def measured(
    folder: Path,
    *,
    seconds: float,
    every_s: float,
    seed: int,
    num_clients: int = 8,
    pass_ms: float = 20.0,
    most: int = 1 << 30,
    say: Callable[[str], object] = print,
) -> tuple[Clients, Chaos]:
    """Run clients on a cluster while faults happen; return what came of it."""
    cluster = Cluster(folder, pass_ms=pass_ms)
    clients, chaos = Clients(cluster.url, num_clients), Chaos(cluster, seed, say)
    try:
        await cluster.start()
        await clients.learn()
        asking = asyncio.create_task(clients.run())
        try:
            await chaos.run(seconds, every_s, most)
        finally:
            clients.end()
            with suppress(TimeoutError):
                await asyncio.wait_for(asking, REQUEST_LIMIT_S)
    finally:
        cluster.close()
    return clients, chaos


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="in which faults happen")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--pass-ms", type=float, default=20.0, help="of a simulated target")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"what the processes say: {folder}", flush=True)
    clients, chaos = asyncio.run(
        measured(
            folder,
            seconds=given.seconds,
            every_s=given.every,
            seed=given.seed,
            num_clients=given.clients,
            pass_ms=given.pass_ms,
            say=lambda line: print(line, flush=True),
        )
    )
    longest = pauses(clients.answers, chaos.happened)
    for kind, number in sorted(Counter(one.kind for one in chaos.happened).items()):
        print(f"{kind:20} {number:3} times, longest pause {longest.get(kind, 0.0):5.1f} s")
    num_resumed = sum(answer.num_resumed for answer in clients.answers)
    print(
        f"{len(chaos.happened)} faults, {len(clients.answers)} answers, {num_resumed} streams "
        f"resumed by clients, {opened_again(folder)} texts opened again, {len(clients.wrong)} wrong"
    )
    for line in clients.wrong:
        print(f"wrong: {line}")
    return 1 if clients.wrong or not clients.answers else 0


if __name__ == "__main__":
    sys.exit(main())
