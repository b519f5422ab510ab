"""Replicas on Ray Serve are killed in mid-stream: clients read undisturbed texts.

In an environment of its own: the wheel beside `ray[serve]`, with the `proto` of proto-plus.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from proto.installation import ROOT
from tests.process.patience import wait_for
from tests.process.ray_nodes import (
    Cluster,
    alive,
    command_of,
    descendants,
    free_port,
    ray_cluster,
)
from tests.process.twelve_streams import LIMIT_S, REQUESTS, Heard, ask
from tests.slipstream.environments import Environment, with_wheel

pytestmark = [pytest.mark.process, pytest.mark.long]

MODELS = (
    *("--target", str(ROOT / "models" / "target"), "--drafter", str(ROOT / "models" / "drafter")),
    *("--dtype", "float32", "--drafter-dtype", "float32", "--max-model-len", "512"),
)
KEY = "0123456789abcdef0123"
HEADERS = {"Authorization": f"Bearer {KEY}"}
MAY_BE = (200, 429, 503)  # what a request may get while replicas die


@dataclass
class Served:
    """Two replicas, which Ray Serve holds, and where clients find them."""

    url: str
    cluster: Cluster
    lines: list[str]
    process: "subprocess.Popen[str]"

    def below(self, words: str) -> list[int]:
        """Process ids of the cluster whose commands have these words, the oldest first."""
        found = {pid for raylet in self.cluster.raylets.values() for pid in descendants(raylet)}
        return sorted(pid for pid in found if words in " ".join(command_of(pid)))

    def servers(self) -> list[int]:
        """The servers that replicas hold."""
        return self.below("-m slipstream serve")

    def replicas(self) -> list[int]:
        """The processes of Ray that hold them."""
        return self.below("ServeReplica:slipstream:pair")

    def targets(self) -> list[int]:
        """The targets of the servers."""
        return self.below("target_node")

    def num_moved(self) -> float:
        """How many streams have gone on elsewhere."""
        text = httpx.get(f"{self.url}/metrics", headers=HEADERS).text
        (found,) = [one for one in text.splitlines() if one.startswith("slipstream_router_moved")]
        return float(found.rsplit(" ", 1)[1])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    return with_wheel(tmp_path_factory.mktemp("machine"), wheel, "ray[serve]")


@pytest.fixture(scope="module")
def cluster(environment: Environment) -> Iterator[Cluster]:
    with ray_cluster(("target+drafter",), environment.python) as made:
        yield made


@contextmanager
def serving(environment: Environment, cluster: Cluster, *flags: str) -> Iterator[Served]:
    """`slipstream serve --ray-serve` until the end of the block, when nothing of it may be left."""
    port = free_port()
    command = ("serve", "--ray-serve", "--replica-cpus", "0.2", "--port", str(port), *flags)
    own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(environment.folder / "bin" / "slipstream"), *command],
        cwd=environment.elsewhere,
        env={
            **own,
            **cluster.env,
            "RAY_ADDRESS": cluster.address,
            "SLIPSTREAM_API_KEY": KEY,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    made = Served(f"http://127.0.0.1:{port}", cluster, [], process)

    def listen() -> None:
        made.lines += process.stderr or ()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield made
    finally:
        started = [*made.servers(), *made.targets()] if process.poll() is None else []
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
        assert wait_for(lambda: not any(map(alive, started)), LIMIT_S), "servers are left"


def is_up(served: Served) -> bool:
    """Whether both replicas answer, or the command has ended."""
    return served.process.poll() is not None or any("Ctrl-C ends" in one for one in served.lines)


@pytest.fixture(scope="module")
def served(environment: Environment, cluster: Cluster) -> Iterator[Served]:
    with serving(environment, cluster, "--replicas", "2", *MODELS) as made:
        assert wait_for(lambda: is_up(made), LIMIT_S), made.lines
        assert made.process.poll() is None, made.lines
        yield made


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[Heard]:
    return [ask(served.url, path, body, key=KEY) for path, body in REQUESTS]


def check_round(served: Served, undisturbed: list[Heard], victims: Callable[[], list[int]]) -> None:
    """Kill one of these in mid-stream; then wait until there are as many again."""
    assert wait_for(lambda: len(served.servers()) == len(served.replicas()) == 2, LIMIT_S)
    assert wait_for(lambda: len(served.targets()) == 2, LIMIT_S)
    begun, over = threading.Semaphore(0), threading.Event()
    answers: list[int] = []

    def others() -> None:
        while not over.wait(0.3):
            body = {"prompt": "x", "max_tokens": 2, "seed": 1}
            asked = httpx.post(
                f"{served.url}/v1/completions", json=body, headers=HEADERS, timeout=LIMIT_S
            )
            answers.append(asked.status_code)

    with ThreadPoolExecutor(len(REQUESTS) + 1) as clients:
        asking = clients.submit(others)
        asked = [clients.submit(ask, served.url, *one, begun, key=KEY) for one in REQUESTS]
        try:
            for _ in range(4):
                assert begun.acquire(timeout=LIMIT_S)
            os.kill(victims()[0], signal.SIGKILL)
            for one, wanted in zip(asked, undisturbed, strict=True):
                one.result(LIMIT_S).check(wanted)
        finally:
            over.set()
        asking.result(LIMIT_S)
    assert answers
    assert set(answers) <= set(MAY_BE)


def test_a_model_that_is_missing_is_one_line(environment: Environment, cluster: Cluster) -> None:
    with serving(environment, cluster, "--target", "/no/such/folder") as made:
        made.process.wait(LIMIT_S)
    assert made.process.returncode == 1
    (line,) = [one for one in made.lines if one.startswith("error: ")]
    assert "/no/such/folder: no such folder" in line
    assert not [one for one in made.lines if "Traceback" in one]


def test_streams_of_a_server_that_is_killed_go_on_elsewhere(
    served: Served, undisturbed: list[Heard]
) -> None:
    before = served.num_moved()
    check_round(served, undisturbed, served.servers)
    assert served.num_moved() > before
    drafted = httpx.post(
        f"{served.url}/v1/completions",
        json={"prompt": "import os\n", "max_tokens": 64, "temperature": 0},
        headers=HEADERS,
        timeout=LIMIT_S,
    ).json()["metrics"]["speculative_decoding"]
    assert drafted["num_accepted_draft_tokens"] > 0, "speculation is dead"


def test_without_a_key_nobody_gets_in_and_a_second_application_is_refused(
    served: Served, environment: Environment
) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    asked = httpx.post(f"{served.url}/v1/completions", json=body, timeout=LIMIT_S)
    assert asked.status_code == 401
    with serving(environment, served.cluster, *MODELS) as second:
        second.process.wait(LIMIT_S)
    assert second.process.returncode == 1
    assert "Ray Serve runs on this cluster already" in "".join(second.lines)
    asked = httpx.post(f"{served.url}/v1/completions", json=body, headers=HEADERS, timeout=LIMIT_S)
    assert asked.status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("kind", ["servers", "replicas", "targets"])
def test_whatever_is_killed_twelve_of_twelve_are_equal(
    served: Served, undisturbed: list[Heard], kind: str, number: int
) -> None:
    del number
    check_round(served, undisturbed, getattr(served, kind))


def test_a_config_file_of_ray_serve_finds_the_application(environment: Environment) -> None:
    """`build` gets the settings as a file has them, in a process with another `proto` installed."""
    program = """
import json
from slipstream.ray_serve import build
try:
    build({"target": "toy", "nonsense": 1})
except Exception as error:
    print(error)
for more in ({}, {"insecure": True, "journal": "/tmp/journal"}):
    try:
        build({"target": "toy", **more})
    except Exception as error:
        print(error)
asked = {"target": "toy", "max-num-seqs": 2, "replicas": 2, "max-replicas": 4}
made = build({**asked, "insecure": True})
print(type(made).__name__)
"""
    unknown, keyless, kept, made = environment.says(program, limit_s=LIMIT_S).splitlines()
    assert unknown == "nonsense: no such setting; they are flags of `serve`"
    assert "key" in keyless
    assert "journal is for one server" in kept
    assert made == "Application"
