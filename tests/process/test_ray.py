"""Nodes on a Ray cluster of two Ray nodes on this machine: same text, nothing left behind."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import yaml
from click import ClickException
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from deploy.ray_launcher import ActorHost, Supervisor, loopback_network
from slipstream import __version__
from tests.process.patience import wait_for
from tests.process.ray_nodes import (
    Cluster,
    alive,
    command_of,
    descendants,
    free_port,
    ray_cluster,
)
from tests.tiny_models import make_model

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"target": "target_node", "drafter": "drafter_node"}
LIMIT_S = 120.0  # a generation with two loads, on a busy machine

# What is left of earlier coordinators, asked of Ray by a process of its own.
LEFT_BEHIND = """
import json, logging, sys, ray
from ray._private.state import actors
from ray.util import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)
there, free = ray.cluster_resources(), ray.available_resources()
print(json.dumps({
    "actors": [actor["State"] for actor in actors().values() if actor["State"] != "DEAD"],
    "groups": [g["state"] for g in placement_group_table().values() if g["state"] != "REMOVED"],
    "taken": [role for role in ("target", "drafter") if free.get(role) != there[role]],
}))
"""
NOTHING: dict[str, list[str]] = {"actors": [], "groups": [], "taken": []}

# The command line in this process; then the packages that it has loaded, on stderr.
AND_ITS_IMPORTS = """
import json, runpy, sys
sys.argv[0] = "coordinator"
try:
    runpy.run_module("coordinator", run_name="__main__")
finally:
    print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})), file=sys.stderr)
"""
# What Ray publishes when a host is gone, told to a coordinator that is connected.
A_HOST_IS_GONE = """
import sys, time
from ray._private.utils import publish_error_to_driver
from ray._private.worker import global_worker
from deploy.ray_launcher import join
join(sys.argv[1])
publish_error_to_driver("node_removed", "a host is gone", gcs_client=global_worker.gcs_client)
time.sleep(2.0)
"""
WITHOUT_RAY = """
import runpy, sys
sys.modules["ray"] = None  # an import of it fails
sys.argv[0] = "coordinator"
runpy.run_module("coordinator", run_name="__main__")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two Ray nodes, one for each role."""
    with ray_cluster(("target", "drafter")) as running:
        yield running


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A generation with a random model that is drafted by itself: every draft is accepted.

    It is waited for, so that drafts come in time on a busy machine too.
    """
    folder = str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))
    return [
        *("generate", "--prompt-ids", "5,6,7", "--target", folder, "--drafter", folder),
        *("--dtype", "float32", "--max-tokens", "120", "--ignore-eos"),
        *("--simulate-target-ms", "5", "--policy", "sync"),
    ]


def run(
    arguments: list[str], env: dict[str, str] | None = None, code: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """The coordinator, or `code` in its place, to its end."""
    start = ["-m", "coordinator"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def alone(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    """The generation without Ray, and what the coordinator had loaded after it."""
    done = run([*arguments, "--json"], code=AND_ITS_IMPORTS)
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def generating(arguments: list[str], cluster: Cluster) -> Iterator["subprocess.Popen[str]"]:
    """A coordinator on the cluster that has begun a long text."""
    coordinator = subprocess.Popen(
        [
            *(sys.executable, "-m", "coordinator", *arguments, "--ray", cluster.address),
            *("--max-tokens", "900", "--simulate-target-ms", "300"),
        ],
        cwd=ROOT,
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert coordinator.stdout is not None
    try:
        assert coordinator.stdout.read(4), "no text came"
        yield coordinator
    finally:
        coordinator.kill()
        coordinator.communicate()


def nodes_under(cluster: Cluster) -> dict[str, list[int]]:
    """The node processes below the raylet of each resource."""
    below = {role: descendants(raylet) for role, raylet in cluster.raylets.items()}
    return {
        role: [pid for pid in pids if command_of(pid)[1:3] == ["-m", MODULES[role]]]
        for role, pids in below.items()
    }


def left_behind(cluster: Cluster) -> dict[str, list[str]]:
    """Actors, placement groups, and resources that are not free."""
    done = run([cluster.address], cluster.env, LEFT_BEHIND)
    assert done.returncode == 0, done.stderr
    left: dict[str, list[str]] = json.loads(done.stdout)
    return left


def assert_nothing_left(cluster: Cluster) -> None:
    """Ray frees what a coordinator had a moment after its end."""
    wait_for(lambda: left_behind(cluster) == NOTHING, 10.0)
    assert left_behind(cluster) == NOTHING


def assert_one_line(done: "subprocess.CompletedProcess[str]", line: str) -> None:
    """It failed and said why in one line on stderr."""
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")


@pytest.mark.long
def test_the_text_is_the_same_as_without_ray(
    cluster: Cluster, arguments: list[str], alone: "subprocess.CompletedProcess[str]"
) -> None:
    there = run([*arguments, "--json", "--ray", cluster.address], cluster.env)
    assert there.returncode == 0, there.stderr
    expected, got = json.loads(alone.stdout), json.loads(there.stdout)
    assert len(got["token_ids"]) == 120
    assert got["token_ids"] == expected["token_ids"]
    assert got["metrics"]["tokens_per_pass"] > 2, "speculation is dead"
    assert_nothing_left(cluster)


@pytest.mark.long
def test_each_node_runs_under_its_own_ray_node_and_ctrl_c_leaves_nothing(
    cluster: Cluster, arguments: list[str]
) -> None:
    with generating(arguments, cluster) as coordinator:
        nodes = nodes_under(cluster)
        assert {role: len(pids) for role, pids in nodes.items()} == {"target": 1, "drafter": 1}
        ours = os.getpriority(os.PRIO_PROCESS, 0)  # and not Ray's, which is lower
        assert [os.getpriority(os.PRIO_PROCESS, pid) for (pid,) in nodes.values()] == [ours] * 2
        held = {"actors": ["ALIVE"] * 2, "groups": ["CREATED"], "taken": ["target", "drafter"]}
        assert left_behind(cluster) == held
        os.killpg(coordinator.pid, signal.SIGINT)
        _, errors = coordinator.communicate(timeout=30)
    assert coordinator.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert not any(alive(pid) for pids in nodes.values() for pid in pids)
    assert_nothing_left(cluster)


@pytest.mark.long
def test_nothing_is_left_when_the_coordinator_is_killed(
    cluster: Cluster, arguments: list[str]
) -> None:
    with generating(arguments, cluster) as coordinator:
        nodes = [pid for pids in nodes_under(cluster).values() for pid in pids]
        assert len(nodes) == 2
        coordinator.kill()
        assert wait_for(lambda: not any(map(alive, nodes)), 5.0)
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_second_coordinator_is_told_that_the_place_is_taken(
    cluster: Cluster, arguments: list[str]
) -> None:
    with generating(arguments, cluster):
        done = run([*arguments, "--ray", cluster.address], cluster.env)
    line = "`target` and `drafter` did not become free in 10 s; another coordinator uses them"
    assert_one_line(done, line)


@pytest.mark.long
def test_a_cluster_without_a_role_is_one_line(arguments: list[str]) -> None:
    with ray_cluster(("target",)) as half:
        done = run([*arguments, "--ray", half.address], half.env)
    assert_one_line(done, "the Ray cluster has no node with the resource `drafter`")


@pytest.mark.long
def test_a_cluster_that_wants_another_token_is_one_line(
    cluster: Cluster, arguments: list[str]
) -> None:
    env = {**cluster.env, "RAY_AUTH_TOKEN": "another"}
    assert_one_line(run([*arguments, "--ray", cluster.address], env), "wants a token")


@pytest.mark.long
def test_what_ray_says_of_its_hosts_is_not_printed_among_the_text(cluster: Cluster) -> None:
    done = run([cluster.address], cluster.env, A_HOST_IS_GONE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.long
def test_an_address_where_nobody_answers_is_one_line_in_time(arguments: list[str]) -> None:
    started = time.monotonic()
    done = run([*arguments, "--ray", f"127.0.0.1:{free_port()}"])
    assert_one_line(done, "there is no Ray cluster at 127.0.0.1:")
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "host:port"])
def test_what_is_not_an_address_is_one_line(arguments: list[str], address: str) -> None:
    assert_one_line(run([*arguments, "--ray", address]), "--ray: expected auto or HOST:PORT")


def test_a_missing_ray_is_one_line(arguments: list[str]) -> None:
    done = run([*arguments, "--ray", "auto"], code=WITHOUT_RAY)
    assert_one_line(done, "--ray needs the package `ray`")


def test_a_supervisor_says_where_it_is_and_when_its_host_has_another_version(
    tmp_path: Path,
) -> None:
    words = f"slipstream on {gethostname()} is {__version__}, and the coordinator's is 0.0.7; inst"
    with pytest.raises(RuntimeError, match=words):
        Supervisor().arrive("0.0.7", str(tmp_path))
    place = ActorHost(*Supervisor().arrive(__version__, str(tmp_path)))
    assert (place.host, place.network) == (gethostname(), loopback_network())
    assert place.can_enter
    assert len(place.public_key) == 40
    assert not ActorHost(*Supervisor().arrive(__version__, "/nowhere")).can_enter


def test_the_keys_of_a_node_stay_with_its_supervisor() -> None:
    supervisor = Supervisor()
    place = ActorHost(*supervisor.arrive(__version__, "/"))
    assert supervisor._keys.secret not in repr(place) + repr(supervisor._keys)


@pytest.mark.long
def test_without_ray_the_coordinator_loads_neither_ray_nor_torch(
    alone: "subprocess.CompletedProcess[str]",
) -> None:
    loaded = set(json.loads(alone.stderr.splitlines()[-1]))
    assert {"coordinator", "proto", "zmq"} <= loaded
    # What is looked at before a node is started is the engine's own view of folders, without torch.
    assert not loaded & {"ray", "torch", "transformers", "node"}


def cluster_config(name: str = "cluster.yaml") -> dict[str, Any]:
    """A file of deploy/ as it is written."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / name).read_text())
    return config


def test_the_cluster_file_for_a_cloud_is_valid_and_gives_each_machine_its_role() -> None:
    config = prepare_config(cluster_config("cluster-cloud.yaml"))
    validate_config(config)
    machines = config["available_node_types"]
    head = machines[config["head_node_type"]]
    (worker,) = (machine for machine in machines.values() if machine is not head)
    assert head["resources"]["target"] == worker["resources"]["drafter"] == 1
    assert worker["min_workers"] == worker["max_workers"] == 1


def test_the_cluster_file_is_valid_and_gives_each_machine_its_role() -> None:
    config = prepare_config(cluster_config())
    validate_config(config)
    assert "--resources='{\"target\": 1}'" in config["head_start_ray_commands"][-1]
    assert "--resources='{\"drafter\": 1}'" in config["worker_start_ray_commands"][-1]
    (machine,) = config["available_node_types"].values()
    assert machine["min_workers"] == len(config["provider"]["worker_ips"]) == 1


def _misspell(config: dict[str, Any]) -> None:
    config["head_start_commands"] = config.pop("head_start_ray_commands")


def _forget_the_head(config: dict[str, Any]) -> None:
    del config["provider"]["head_ip"]


def _add_node_types(config: dict[str, Any]) -> None:
    config["available_node_types"] = {"target": {"resources": {"target": 1}, "node_config": {}}}


def _misspell_the_user(config: dict[str, Any]) -> None:
    config["auth"]["user"] = config["auth"].pop("ssh_user")


@pytest.mark.parametrize(
    ("plant", "refusal"),
    [
        (_misspell, ValidationError),
        (_forget_the_head, ClickException),
        (_add_node_types, ClickException),
        (_misspell_the_user, ValidationError),
    ],
)
def test_an_error_planted_in_the_cluster_file_is_refused(
    plant: Callable[[dict[str, Any]], None], refusal: type[Exception]
) -> None:
    config = copy.deepcopy(cluster_config())
    plant(config)
    with pytest.raises(refusal):
        validate_config(prepare_config(config))
