"""Ray nodes on this machine for tests: real, on free ports, with a token, in their own folder.

They are ended by their process ids. `ray stop` would end every Ray process of the machine.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.process.patience import wait_for

START_LIMIT_S = 60.0
END_LIMIT_S = 30.0


@dataclass(slots=True)
class Cluster:
    """Where the cluster is, what a process needs to join it, and its raylets by resource."""

    address: str
    env: dict[str, str]
    raylets: dict[str, int] = field(default_factory=dict)


@contextmanager
def ray_cluster(resources: tuple[str, ...], python: str = sys.executable) -> Iterator[Cluster]:
    """A Ray node for each resource; the first is the head. Afterwards nothing of it is left.

    resources  several of one node are joined by +
    python     that runs Ray
    """
    with ExitStack() as stack:
        # Not pytest's folder: Ray's socket paths would be too long in it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sr-")))
        env = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_worker_niceness": "0",
        }
        env.pop("RAY_ADDRESS", None)
        port = free_port()
        cluster = Cluster(f"127.0.0.1:{port}", env)
        for resource in resources:
            place = [f"--address={cluster.address}"]
            if not cluster.raylets:
                place = ["--head", f"--port={port}", f"--temp-dir={folder}"]
                place += ["--include-dashboard=false"]
            node = stack.enter_context(_ray_node(python, place, resource, folder, env))
            cluster.raylets[resource] = _raylet_of(node)
        yield cluster


@contextmanager
def _ray_node(
    python: str, place: list[str], resource: str, folder: Path, env: dict[str, str]
) -> Iterator[int]:
    """A node in the foreground of a process of its own: that process ends the node's others."""
    log = folder / f"{resource}.log"
    command = [python, "-m", "ray.scripts.scripts", "start", "--block", *place]
    offered = json.dumps(dict.fromkeys(resource.split("+"), 1))
    command += ["--node-ip-address=127.0.0.1", f"--resources={offered}"]
    command += ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
    command += ["--include-log-monitor=false", "--min-worker-port=0", "--max-worker-port=0"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        up = wait_for(
            lambda: process.poll() is not None or "block forever" in log.read_text(), START_LIMIT_S
        )
        assert up, f"Ray did not start:\n{log.read_text()}"
        assert process.poll() is None, f"Ray did not start:\n{log.read_text()}"
        yield process.pid
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    everything = [process.pid, *descendants(process.pid)]
    process.terminate()
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if not wait_for(lambda: not any(map(alive, everything)), 10.0):
        for pid in filter(alive, everything):
            os.kill(pid, signal.SIGKILL)


def _raylet_of(pid: int) -> int:
    (raylet,) = [child for child in descendants(pid) if command_of(child)[0].endswith("/raylet")]
    return raylet


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """Process ids below a process: children, their children, and so on."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue  # the thread has just ended
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def command_of(pid: int) -> list[str]:
    """The command line of a process; [""] when it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return [""]


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
