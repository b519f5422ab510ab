"""Many hostile sessions at a coordinator, beside an honest node that is answered all the while."""

import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from zmq.utils import z85

from tests.hostile.besieged import NAMES
from tests.hostile.curve import Door, Pair
from tests.hostile.sessions import run

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0


@dataclass
class Outcome:
    """What became of the coordinator.

    kinds       sessions of each kind
    status      of the coordinator's process at its end
    num_answers that the honest node got
    longest_s   between two of them
    kib         memory of the coordinator, before the sessions (after the first) and after them
    """

    kinds: Counter[str] = field(default_factory=Counter)
    status: int = -1
    num_answers: int = 0
    longest_s: float = 0.0
    kib: tuple[int, int] = (0, 0)
    num_refused: int = 0
    errors: str = ""


def _z85(key: bytes) -> str:
    return str(z85.encode(key).decode())


@contextmanager
def _process(module: str, given: object) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _kib(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize() // 1024


def besiege(
    num_sessions: int, *, seed: int, warm_up: int = 0, num_threads: int = 4, limit_s: float = 3600.0
) -> Outcome:
    """Run so many sessions, with some before them that are not counted."""
    coordinator, honest = Pair.new(), Pair.new()
    pairs = {name: Pair.new() for name in NAMES if name != "drafter-1"}
    pairs["drafter-1"] = honest  # a copied key: its name is taken while its owner is there
    outcome = Outcome()
    given = {
        "public": _z85(coordinator.public),
        "secret": _z85(coordinator.secret),
        "nodes": {name: _z85(pair.public) for name, pair in pairs.items()},
    }
    with _process("tests.hostile.besieged", given) as besieged:
        port = int(_line(besieged))
        node = {
            "port": port,
            "coordinator": given["public"],
            "public": _z85(honest.public),
            "secret": _z85(honest.secret),
        }
        with _process("tests.hostile.honest", node) as witness:
            assert _line(witness) == "answered"
            door = Door(port, coordinator.public, pairs)
            _send_all(door, f"{seed} warm", warm_up, num_threads, limit_s)
            before = _kib(besieged.pid)
            outcome.kinds = _send_all(door, str(seed), num_sessions, num_threads, limit_s)
            answer, _ = witness.communicate(timeout=LIMIT_S)
            outcome.num_answers, outcome.longest_s = json.loads(answer)
        outcome.kib = before, _kib(besieged.pid)
        answer, outcome.errors = besieged.communicate("?", timeout=LIMIT_S)
        outcome.num_refused = int(answer or 0)
        outcome.status = besieged.returncode
    return outcome


def _send_all(door: Door, seed: str, number: int, num_threads: int, limit_s: float) -> Counter[str]:
    deadline = time.monotonic() + limit_s
    numbers = count()
    kinds: Counter[str] = Counter()

    def work() -> None:
        while (index := next(numbers)) < number and time.monotonic() < deadline:
            kinds[run(f"{seed} {index}", door)] += 1

    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(work) for _ in range(num_threads)]:
            done.result()
    return kinds
