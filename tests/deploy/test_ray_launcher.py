"""Who starts nodes on a Ray cluster, without one: actors that answer at once, or go."""

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from coordinator.launching.launcher import Launcher, Obituary, Wanted
from deploy import ray_launcher
from deploy.ray_launcher import Lookout, RayLauncher
from deploy.supervisor import loopback_network
from proto.errors import NodeError
from proto.messages import Role
from proto.node_config import NodeConfig

ROOT = Path(__file__).resolve().parents[2]
# A program that leaves a cluster which does not answer, and ends in one way or another.
LEAVING = """
import atexit, sys, time
from ray._private import worker
from deploy import ray_launcher
def hang(*_, **__):
    print("it waits for Ray", flush=True)
    time.sleep(30.0)
atexit.register(hang)
worker.shutdown = worker.custom_excepthook = sys.excepthook = hang
ray_launcher._leave = hang
ray_launcher.ray.is_initialized = lambda: True
ray_launcher.CLOSE_LIMIT_S = 0.1
ray_launcher._leave_in_time([], None)
sys.stdout.write("the text")
{}
"""
WANTED = Wanted("auto", {Role.DRAFTER: "cpu"})


class Method:
    """What an actor's method returns, or raises, when it is asked for."""

    def __init__(self, actor: "Actor", answer: Any) -> None:
        self._actor = actor
        self._answer = answer

    def remote(self, *_: object, **__: object) -> "Method":
        """Call it."""
        return self

    def get(self) -> Any:
        """What has come of it."""
        if self._actor.is_dead:
            raise ActorDiedError
        return self._answer() if callable(self._answer) else self._answer

    def future(self) -> Future[Obituary]:
        """For a wait that ends by hand."""
        return self._actor.death


class Actor:
    """A supervisor on this host."""

    def __init__(self, arriving: Any = None, gpus: tuple[str, ...] = ()) -> None:
        self.is_dead = False
        self.death: Future[Obituary] = Future()
        place = ("host", loopback_network(), True, "key", gpus)
        self.arrive = Method(self, lambda: arriving() if arriving else place)
        self.start = Method(self, 4711)
        self.wait = Method(self, None)
        self.close = Method(self, None)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[Actor]:
    """The supervisors that have been made, in a cluster that is always there."""
    made: list[Actor] = []

    def supervisor(*_: object) -> Actor:
        made.append(Actor())
        return made[-1]

    monkeypatch.setattr(ray_launcher, "check_reachable", lambda _: None)
    monkeypatch.setattr(ray_launcher, "join", lambda _: None)
    monkeypatch.setattr(ray_launcher, "_bundles", lambda _: [{"drafter": 1.0}])
    monkeypatch.setattr(ray_launcher, "_reserve", lambda *_, **__: None)
    monkeypatch.setattr(ray_launcher, "_supervisor", supervisor)
    monkeypatch.setattr(ray_launcher.ray, "get", lambda method, timeout: method.get())
    monkeypatch.setattr(ray_launcher.ray, "kill", lambda actor: setattr(actor, "is_dead", True))
    monkeypatch.setattr(ray_launcher.ray, "is_initialized", lambda: False)
    return made


def drafter(identity: str = "drafter-1") -> NodeConfig:
    """One to start."""
    return NodeConfig(Role.DRAFTER, "ipc:///x", identity, secret="", model="m")


def test_a_node_that_has_ended_is_started_again_by_the_same_actor(actors: list[Actor]) -> None:
    launcher = RayLauncher(WANTED)
    launcher.start(drafter())
    actors[0].death.set_result(Obituary("drafter-1", "it has ended", 1))
    assert [end.line for end in launcher.ended()] == ["it has ended"]
    launcher.start(drafter("drafter-1.1"))
    assert len(actors) == 1
    assert launcher.pids() == {"drafter-1.1": 4711}
    launcher.close()


@pytest.mark.parametrize("second", ["GPU-a", "GPU-b"])
def test_one_line_says_that_two_nodes_are_on_one_gpu(
    second: str,
    actors: list[Actor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus = iter([("GPU-a",), (second,)])
    monkeypatch.setattr(ray_launcher, "_supervisor", lambda *_: Actor(gpus=next(gpus)))
    monkeypatch.setattr(ray_launcher, "_bundles", lambda _: [{"target": 1.0}, {"drafter": 1.0}])
    launcher = RayLauncher(Wanted("auto", {Role.TARGET: "", Role.DRAFTER: ""}))
    launcher.close()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("both nodes share a GPU of a Ray host") for line in lines] == (
        [True] if second == "GPU-a" else []
    )


def test_where_the_actor_is_gone_another_takes_its_place(actors: list[Actor]) -> None:
    launcher = RayLauncher(WANTED)
    launcher.start(drafter())
    actors[0].death.set_exception(ActorDiedError())
    (end,) = launcher.ended()
    assert (end.identity, end.status) == ("drafter-1", None)
    assert end.line == "the drafter process went with its host host"
    launcher.start(drafter("drafter-1.1"))
    assert len(actors) == 2
    # The process ends first, and then its host.
    actors[1].death.set_result(Obituary("drafter-1.1", "it has ended", -15))
    assert len(launcher.ended()) == 1
    actors[1].is_dead = True
    with pytest.raises(NodeError, match="its host does not answer"):
        launcher.start(drafter("drafter-1.2"))
    launcher.start(drafter("drafter-1.3"))
    assert len(actors) == 3
    launcher.close()


def died(words: str) -> ActorDiedError:
    """The error of an actor that has gone, as Ray makes it."""
    context = ActorDiedErrorContext(error_message=words, actor_id=bytes(16))
    return ActorDiedError(context)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("The actor died because its node has died. Node Id: 4711", "its host host"),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
            "the Ray actor that held it on host",
        ),
        (
            "The actor is dead because it was killed by `ray.kill`.",
            "the Ray actor that held it on host",
        ),
    ],
)
def test_an_actor_that_was_killed_is_not_called_its_host(
    words: str, line: str, actors: list[Actor]
) -> None:
    launcher = RayLauncher(WANTED)
    launcher.start(drafter())
    actors[0].death.set_exception(died(words))
    assert [end.line for end in launcher.ended()] == [f"the drafter process went with {line}"]
    launcher.close()


def test_an_actor_that_is_killed_while_it_starts_a_node_is_not_called_its_host(
    actors: list[Actor],
) -> None:
    launcher = RayLauncher(WANTED)

    def killed() -> None:
        raise died("The actor is dead because its worker process has died.")

    actors[0].start = Method(actors[0], killed)
    with pytest.raises(NodeError, match="the Ray actor that holds it has died"):
        launcher.start(drafter())
    launcher.close()


@pytest.mark.parametrize(
    ("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('wrong')", 1)]
)
def test_a_cluster_that_does_not_answer_changes_no_exit_status(end: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING.format(end)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "it waits for Ray\nthe text"), done.stderr
    assert ("ValueError: wrong" in done.stderr) == (status == 1)


def test_what_is_closed_while_an_actor_comes_starts_nothing(
    actors: list[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = RayLauncher(WANTED)
    launcher.start(drafter())
    actors[0].death.set_exception(ActorDiedError())
    launcher.ended()

    def arriving() -> tuple[str, str, bool, str]:
        closing = threading.Thread(target=launcher.close)
        closing.start()
        closing.join(10.0)
        return "host", loopback_network(), True, "key", ()

    monkeypatch.setattr(ray_launcher, "_supervisor", lambda *_: Actor(arriving))
    for _ in range(2):
        with pytest.raises(NodeError, match="cannot start the drafter"):
            launcher.start(drafter("drafter-1.1"))
    assert launcher.pids() == {}


def test_a_launcher_that_is_closed_starts_nothing() -> None:
    launcher = Launcher()
    folder: Path = launcher.folder
    launcher.close()
    with pytest.raises(NodeError, match="all are being ended"):
        launcher.start(drafter())
    assert not folder.exists()


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "expected"),
    [(1, 1, [0.5, 0.5]), (4, 1, [1.0, 1.0]), (4, 3, [3.0, 1.0])],
)
def test_a_model_of_several_ranks_asks_for_as_many_gpus(
    num_gpus: int, ranks: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"target": 1.0, "drafter": 1.0, "CPU": 8.0, "GPU": float(num_gpus)}
    nodes = [{"Alive": True, "Resources": resources}]
    monkeypatch.setattr(ray_launcher.ray, "nodes", lambda: nodes)
    devices = {Role.TARGET: f"cuda:0-{ranks - 1}", Role.DRAFTER: ""}
    wanted = Wanted("auto", devices, ranks={Role.TARGET: ranks, Role.DRAFTER: 1})
    assert [bundle["GPU"] for bundle in ray_launcher._bundles(wanted)] == expected


def test_a_host_that_comes_is_news_once_and_one_that_was_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_launcher, "LOOK_EVERY_S", 0.0)
    hosts = {"head": frozenset({"target", "CPU"}), "dead": frozenset({"drafter"})}
    lookout = Lookout(lambda: dict(hosts))

    def has_news(*wanted: str) -> bool:
        """Within some looks."""
        return any((lookout.has_news(set(wanted)), time.sleep(0.01))[0] for _ in range(20))

    assert not has_news()
    assert not has_news("drafter")
    hosts["other"] = frozenset({"CPU"})
    assert not has_news("drafter"), "it offers nothing that is wanted"
    del hosts["dead"]
    assert not has_news("drafter")
    hosts["again"] = frozenset({"drafter"})
    assert has_news("drafter")
    assert not has_news("drafter")
