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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.experiments.rows import read
from tests.process import hosts as simulated
from tests.process.hosts import Host, Hosts
from tests.process.patience import wait_for
from tests.tiny_models import make_model

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(bool(simulated.why_not()), reason=simulated.why_not()),
]

SLOW_TEST = pytest.mark.slow
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


FLOAT = ("--dtype", "float32")
SLOW = (*FLOAT, "--simulate-target-ms", "40", "--simulate-draft-ms", "4")
# Slow enough that something can happen in the middle, wherever a machine is slow itself.
LONG = (*FLOAT, "--simulate-target-ms", "150", "--max-tokens", "220", "--policy", "pipelined")
IN_THE_MIDDLE_S = 1.5  # after the nodes are there
AGAIN = range(1, 10)  # the runs that are slow


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


@dataclass(slots=True)
class Generation:
    """A coordinator at work, and the file that holds what it says of itself."""

    process: "subprocess.Popen[str]"
    errors: Path

    @property
    def said(self) -> str:
        """So far."""
        return self.errors.read_text()

    def has_said(self, words: str) -> bool:
        """Whether it says that in time."""
        wait_for(lambda: words in self.said or self.process.poll() is not None, LIMIT_S)
        return words in self.said

    def made(self) -> dict[str, Any]:
        """What it has made, when it has ended."""
        text, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, self.said
        assert "Traceback" not in self.said
        made: dict[str, Any] = json.loads(text)
        return made


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


def come_again(hosts: Hosts, cluster: Path) -> None:
    """Boot the drafter's host and let it join the cluster, as somebody would by hand."""
    hosts["one"].boot()
    config = yaml.safe_load(cluster.read_text())
    for command in config["worker_start_ray_commands"]:
        env = f"export RAY_HEAD_IP={hosts['head'].address} RAY_AUTH_MODE=token"
        env += f" PATH={Path(sys.executable).parent}:$PATH"
        done = hosts["one"].run("bash", "-c", f"{env}; {command}")
        assert done.returncode == 0, done.stdout + done.stderr


def in_the_middle(hosts: Hosts, *arguments: str) -> Generation:
    """A generation on the head's host, drafted for on another, whose text has begun."""
    command = coordinator(*arguments, "--ray", "auto")
    errors = hosts.folder / "said"
    start = ("env", "RAY_AUTH_MODE=token", *command)
    running = Generation(hosts["head"].start(*start, cwd=ROOT, errors=errors), errors)
    assert running.has_said("drafter: llama, float32, on one"), running.said
    time.sleep(IN_THE_MIDDLE_S)
    return running


def test_ray_exec_writes_the_text_with_target_and_drafter_on_two_hosts(
    hosts: Hosts, cluster: Path, arguments: list[str], alone: list[int]
) -> None:
    words = " ".join(coordinator(*arguments, *SLOW, "--ray", "auto"))
    done = ray(hosts, "exec", str(cluster), f"cd {ROOT} && {words}")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    made = json.loads(line)
    assert made["token_ids"] == alone
    assert made["metrics"]["tokens_per_pass"] > 2, "speculation is dead"
    said = done.stdout + done.stderr
    assert re.search(r"target: .* on head \(cpu.*\), \d+\.\d ms there and back", said)
    assert re.search(r"drafter: .* on one \(cpu.*\), \d+\.\d ms there and back", said)


@SLOW_TEST
@pytest.mark.parametrize("run", [0, *AGAIN])
def test_the_text_is_whole_when_the_link_is_cut_and_drafts_come_again_when_it_is_healed(
    hosts: Hosts, cluster: Path, arguments: list[str], alone: list[int], run: int
) -> None:
    del cluster, run
    running = in_the_middle(hosts, *arguments, *LONG)
    hosts["one"].set_link(is_up=False)
    time.sleep(1.5)
    hosts["one"].set_link(is_up=True)
    made = running.made()
    assert made["token_ids"] == alone[:220]
    assert "draft:model" in made["token_origins"][-40:], running.said


@SLOW_TEST
@pytest.mark.parametrize("run", [0, *AGAIN])
def test_the_text_is_whole_when_the_drafters_host_is_killed(
    hosts: Hosts, cluster: Path, arguments: list[str], alone: list[int], run: int
) -> None:
    del run
    running = in_the_middle(hosts, *arguments, *LONG)
    hosts["one"].kill()
    try:
        made = running.made()
    finally:
        come_again(hosts, cluster)
    assert made["token_ids"] == alone[:220]
    assert made["token_origins"].count("draft:model") > 10, "speculation is dead"
    assert "draft:model" not in made["token_origins"][-20:]
    assert "the drafter process went with its host one" in running.said


@pytest.mark.slow
def test_the_drafter_is_there_again_when_its_host_is(
    hosts: Hosts, cluster: Path, arguments: list[str], alone: list[int]
) -> None:
    running = in_the_middle(hosts, *arguments, *LONG, "--simulate-target-ms", "600")
    hosts["one"].kill()
    come_again(hosts, cluster)
    assert running.has_said("the drafter is there again"), running.said
    made = running.made()
    assert made["token_ids"] == alone[:220]
    assert "draft:2" in made["token_origins"][-20:], running.said  # the drafter after the first


@pytest.mark.slow
def test_an_experiment_runs_across_hosts_and_says_which_rows_came_from_where(
    hosts: Hosts, cluster: Path
) -> None:
    out = hosts.folder / "experiment"
    small = ("--limit", "2", "--repetitions", "1", "--set", "max_tokens=24")
    words = coordinator("experiment", "hosts", "--out", str(out), "--report", *small)
    done = ray(hosts, "exec", str(cluster), f"cd {ROOT} && {' '.join(words)}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read(out / "rows.jsonl")
    assert len(rows) == 5 * 2
    for row in rows:
        assert (row.hosts["target"].split()[0], row.hosts["drafter"].split()[0]) == ("head", "one")
    alone = {row.prompt: row.tokens for row in rows if row.arm == "ar"}
    assert all(row.tokens == alone[row.prompt] for row in rows)
    assert any(row.accepted_by_source for row in rows), "speculation is dead"
    page = (out / "report.html").read_text()
    assert re.search(r"drafter.*\bone\b", page, re.DOTALL)
