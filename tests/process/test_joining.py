"""Nodes that are started by hand: they load once, and serve one coordinator after another."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.process.ray_nodes import free_port, wait_for
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
PROMPT = ("--prompt-ids", "5,6,7", "--max-tokens", "60", "--ignore-eos", "--json")


def coordinator(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run one to its end."""
    return subprocess.run(
        [sys.executable, "-m", "coordinator", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model, drafted by itself."""
    return str(make_model("llama", tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of keys."""
    folder = tmp_path_factory.mktemp("links") / "keys"
    made = coordinator("keys", "new", str(folder))
    assert made.returncode == 0, made.stderr
    return str(folder)


class Node:
    """A process that somebody has started by hand, and what it says."""

    def __init__(self, module: str, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], cwd=ROOT, stderr=output
            )

    def has_said(self, line: str, times: int = 1) -> bool:
        """Whether it says this so often in time."""
        return wait_for(lambda: self.log.read_text().count(line) >= times, LIMIT_S)


@contextmanager
def joined(module: str, log: Path, endpoint: str, model: str, *more: str) -> Iterator[Node]:
    """A node that waits for a coordinator."""
    node = Node(module, log, "--join", endpoint, "--model", model, "--dtype", "float32", *more)
    try:
        assert node.has_said("waits for a coordinator"), log.read_text()
        yield node
    finally:
        node.process.kill()
        node.process.wait()


def test_nodes_serve_one_coordinator_after_another_without_loading_again(
    model: str, keys: str, tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    slow = ("--simulate-ms", "10")
    models = ("--target", model, "--drafter", model)
    alone = coordinator("generate", *PROMPT, *models, "--dtype", "float32", "--policy", "ar")
    expected = json.loads(alone.stdout)["token_ids"]
    with (
        joined("target_node", tmp_path / "t", endpoint, model, "--keys", keys, *slow) as target,
        joined("drafter_node", tmp_path / "d", endpoint, model, "--keys", keys) as drafter,
    ):
        for number in (1, 2):
            remote = ("--nodes", "remote", "--listen", endpoint, "--keys", keys)
            done = coordinator("generate", *PROMPT, *models, *remote, "--policy", "sync")
            assert done.returncode == 0, done.stderr
            made: dict[str, Any] = json.loads(done.stdout)
            assert made["token_ids"] == expected
            assert made["metrics"]["tokens_per_pass"] > 2, "speculation is dead"
            assert "ms there and back" in done.stderr
            for node in (target, drafter):
                # It says that it ends, but a message may be lost: then its silence says it.
                assert node.has_said("the coordinator has", number)
        for node in (target, drafter):
            assert node.log.read_text().count("reading") <= 1
            node.process.send_signal(signal.SIGINT)
            assert node.process.wait(10.0) in (0, 130)
            assert "Traceback" not in node.log.read_text()


@pytest.mark.slow
def test_a_node_that_loses_its_coordinator_waits_for_the_next(
    model: str, keys: str, tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    remote = ("--nodes", "remote", "--listen", endpoint, "--keys", keys, "--policy", "ar")
    models = ("--target", model, "--drafter", model)
    with joined(
        "target_node", tmp_path / "t", endpoint, model, "--keys", keys, "--simulate-ms", "50"
    ) as target:
        long = ("--prompt-ids", "5,6,7", "--max-tokens", "900", "--ignore-eos")
        first = subprocess.Popen(
            [sys.executable, "-m", "coordinator", "generate", *long, *models, *remote],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert first.stdout is not None
        assert first.stdout.read(4)
        first.kill()
        first.communicate()
        assert target.has_said("the coordinator has been silent")
        done = coordinator("generate", *PROMPT, *models, *remote)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_node_without_the_right_keys_is_refused_and_the_text_goes_on(
    model: str, keys: str, tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    others = tmp_path / "others"
    assert coordinator("keys", "new", str(others)).returncode == 0
    (others / "coordinator.key").write_bytes((Path(keys) / "coordinator.key").read_bytes())
    models = ("--target", model, "--drafter", model)
    remote = ("--nodes", "remote", "--listen", endpoint, "--keys", keys, "--policy", "ar")
    with (
        joined("drafter_node", tmp_path / "d", endpoint, model, "--keys", str(others)),
        joined(
            "target_node", tmp_path / "t", endpoint, model, "--keys", keys, "--simulate-ms", "20"
        ),
    ):
        done = coordinator("generate", *PROMPT, *models, *remote)
        assert done.returncode == 0, done.stderr
        assert "refused a connection" in done.stderr


def assert_one_line(done: "subprocess.CompletedProcess[str]", words: str) -> None:
    """It failed, and said why in one line."""
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert words in done.stderr


def node(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A node that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_what_cannot_be_joined_is_one_line(keys: str, tmp_path: Path) -> None:
    far = ("--join", "tcp://192.0.2.1:5555")
    assert_one_line(node("target_node", *far), "without keys nothing is encrypted")
    assert_one_line(node("target_node", *far, "--keys", str(tmp_path)), "cannot read the key")
    assert_one_line(node("target_node", "--keys", keys), "--join")
    readable = tmp_path / "keys"
    assert coordinator("keys", "new", str(readable)).returncode == 0
    (readable / "target.key_secret").chmod(0o644)
    assert_one_line(node("target_node", *far, "--keys", str(readable)), "others may read")
    local = ("--join", "tcp://127.0.0.1:5555", "--model", str(tmp_path))
    assert_one_line(node("target_node", *local), "no config.json")


def test_what_a_coordinator_cannot_do_with_remote_nodes_is_one_line(keys: str) -> None:
    def generate(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return coordinator("generate", "--prompt-ids", "1,2", *arguments)

    remote = ("--nodes", "remote", "--listen", "tcp://0.0.0.0:5571")
    assert_one_line(generate("--nodes", "remote"), "needs --listen")
    assert_one_line(generate(*remote), "without keys nothing is encrypted")
    assert_one_line(
        generate(*remote, "--keys", keys, "--dtype", "float32"), "--dtype is for nodes that"
    )
    assert_one_line(generate("--listen", "tcp://127.0.0.1:1"), "are for --nodes remote")
    assert_one_line(
        generate("--nodes", "remote", "--listen", "here"), "expected tcp://ADDRESS:PORT"
    )
    again = coordinator("keys", "new", keys)
    assert_one_line(again, "is there already")


def test_keys_are_for_their_owner_alone(keys: str) -> None:
    modes = {file.name: file.stat().st_mode & 0o777 for file in Path(keys).iterdir()}
    assert {modes[f"{name}.key_secret"] for name in ("coordinator", "target", "drafter")} == {0o600}
    assert len(modes) == 6
