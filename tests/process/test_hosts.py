"""Several hosts: brought up by `ray up`, and nodes that are started by hand.

They are namespaces of this machine (`hosts.py`).
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.process import hosts as simulated
from tests.process.hosts import Host, Hosts
from tests.process.ray_nodes import wait_for
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(bool(simulated.why_not()), reason=simulated.why_not()),
]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
SILENCE_S = 20.0  # the limit for a target is 15
PORT = 5570
# The newer one asks for a worker of the `local` provider for ever and starts none.
OLDER_AUTOSCALER = "RAY_UP_enable_autoscaler_v2=0"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three for a cluster, and the one of whoever uses it."""
    with simulated.hosts("head", "one", "two", "user") as made:
        yield made


@pytest.fixture(scope="module")
def model(hosts: Hosts) -> str:
    """A random model, where every host sees it."""
    return str(make_model("llama", hosts.folder / "llama"))


@pytest.fixture(scope="module")
def arguments(model: str) -> list[str]:
    """A text that is drafted by its own model: drafts are accepted wherever they come in time."""
    return [
        *("generate", "--json", "--prompt-ids", "5,6,7", "--target", model, "--drafter", model),
        *("--max-tokens", "300", "--ignore-eos"),
    ]


SLOW = ("--dtype", "float32", "--simulate-target-ms", "40", "--simulate-draft-ms", "4")


def coordinator(*arguments: str) -> list[str]:
    """Its command line."""
    return [sys.executable, "-m", "coordinator", *arguments]


@pytest.fixture(scope="module")
def alone(arguments: list[str]) -> list[int]:
    """The text as the target alone writes it, on one host."""
    done = subprocess.run(
        coordinator(*arguments, "--dtype", "float32", "--policy", "ar"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return list(json.loads(done.stdout)["token_ids"])


def told(process: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
    """What it made, and what it said."""
    text, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    made: dict[str, Any] = json.loads(text)
    return made, said


def has_begun(host: Host, module: str) -> bool:
    """Whether a node process is at work on the host."""
    return host.run("pgrep", "-f", "--", f"-m {module}").returncode == 0


# -- ray up ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[Path]:
    """The cluster that deploy/cluster.yaml describes, on these hosts; its file."""
    config = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())
    config["provider"] |= {"head_ip": hosts["head"].address, "worker_ips": [hosts["one"].address]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(hosts.key)}
    # The repository and its environment are there already.
    config["file_mounts"] = {}
    lines = f"export PATH={Path(sys.executable).parent}:$PATH RAY_AUTH_MODE=token"
    config["setup_commands"] = [
        f"printf '%s\\n' '{lines}' | cat - ~/.bashrc > ~/b; mv ~/b ~/.bashrc"
    ]
    file = hosts.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    up = ray(hosts, "up", "--yes", "--no-config-cache", str(file))
    assert up.returncode == 0, up.stdout + up.stderr
    ready = wait_for(lambda: "drafter" in ray(hosts, "exec", str(file), "ray status").stdout, 60.0)
    assert ready, ray(hosts, "exec", str(file), "ray status").stdout
    yield file
    down = ray(hosts, "down", "--yes", str(file))
    assert down.returncode == 0, down.stdout + down.stderr
    assert wait_for(lambda: not has_begun(hosts["head"], "ray.scripts"), 60.0)


def ray(hosts: Hosts, *words: str) -> "subprocess.CompletedProcess[str]":
    """A command of the user's."""
    env = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    return hosts["user"].run(
        "env", env, "RAY_AUTH_MODE=token", OLDER_AUTOSCALER, "ray", *words, limit_s=180.0
    )


def with_ray(hosts: Hosts, *arguments: str) -> "subprocess.Popen[str]":
    """A generation on the head's host."""
    command = coordinator(*arguments, "--ray", "auto")
    return hosts["head"].start("env", "RAY_AUTH_MODE=token", *command, cwd=ROOT)


def test_ray_exec_writes_the_text_with_target_and_drafter_on_two_hosts(
    hosts: Hosts, cluster: Path, arguments: list[str], alone: list[int]
) -> None:
    words = " ".join(coordinator(*arguments, *SLOW, "--ray", "auto"))
    done = ray(hosts, "exec", str(cluster), f"cd {ROOT} && {words}")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    made = json.loads(line)
    assert made["token_ids"] == alone
    assert made["metrics"]["mean_acceptance_length"] > 2, "speculation is dead"
    said = done.stdout + done.stderr
    assert re.search(r"target: .* on head \(cpu.*\), \d+\.\d ms there and back", said)
    assert re.search(r"drafter: .* on one \(cpu.*\), \d+\.\d ms there and back", said)


def test_the_text_is_whole_when_the_link_is_cut_and_drafts_come_again_when_it_is_healed(
    hosts: Hosts, cluster: Path, arguments: list[str], alone: list[int]
) -> None:
    del cluster
    process = with_ray(hosts, *arguments, *SLOW, "--policy", "pipelined")
    assert wait_for(lambda: has_begun(hosts["one"], "drafter_node"), LIMIT_S)
    time.sleep(9.0)  # it has loaded, and the text has begun
    hosts["one"].set_link(is_up=False)
    time.sleep(1.5)
    hosts["one"].set_link(is_up=True)
    made, said = told(process)
    assert made["token_ids"] == alone
    assert "draft:model" in made["token_origins"][-40:], said


def test_the_text_is_whole_when_the_drafters_host_is_killed(
    hosts: Hosts, cluster: Path, arguments: list[str], alone: list[int]
) -> None:
    del cluster
    process = with_ray(hosts, *arguments, *SLOW, "--policy", "pipelined")
    assert wait_for(lambda: has_begun(hosts["one"], "drafter_node"), LIMIT_S)
    time.sleep(9.0)
    hosts["one"].kill()
    made, said = told(process)
    assert made["token_ids"] == alone
    assert "the drafter" in said
    assert "Traceback" not in said


# -- by hand --------------------------------------------------------------------------------------


def test_the_end_of_the_targets_host_is_one_line_within_the_limit_of_silence() -> None:
    with simulated.hosts("here", "there") as pair:
        keys, model = pair.folder / "keys", str(make_model("llama", pair.folder / "llama"))
        made = pair["here"].run(*coordinator("keys", "new", str(keys)), cwd=ROOT)
        assert made.returncode == 0, made.stderr
        endpoint = f"tcp://{pair['here'].address}:{PORT}"
        join = ("--join", endpoint, "--keys", str(keys), "--model", model, "--simulate-ms", "100")
        target = pair["there"].start(sys.executable, "-m", "target_node", *join, cwd=ROOT)
        remote = ("--nodes", "remote", "--listen", endpoint, "--keys", str(keys))
        models = ("--target", model, "--drafter", model, "--policy", "ar")
        text = ("generate", "--prompt-ids", "5,6,7", "--max-tokens", "300", "--ignore-eos")
        running = pair["here"].start(*coordinator(*text, *models, *remote), cwd=ROOT)
        assert running.stdout is not None
        assert running.stdout.read(4), "no text came"
        pair["there"].kill()
        target.communicate(timeout=LIMIT_S)
        began = time.monotonic()
        _, said = running.communicate(timeout=LIMIT_S)
        assert time.monotonic() - began < SILENCE_S
        assert running.returncode == 1
        lines = said.splitlines()
        assert "ms there and back" in lines[-2]
        assert lines[-1].startswith("error: "), said
        assert "target" in lines[-1]
