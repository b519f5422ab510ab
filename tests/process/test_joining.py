"""Nodes that are started by hand: they load once, and serve one coordinator after another."""

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proto.codec import encode
from proto.links.keys import of_node
from proto.links.transport import Connection
from proto.messages import Fault, FaultCode
from tests.process import eight_texts
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
                assert node.has_said("the coordinator has ended", number)
        for node, line in ((target, "target: interrupted"), (drafter, "drafter: interrupted")):
            said = node.log.read_text()
            assert said.count("loading") <= 1
            assert "silent" not in said
            node.process.send_signal(signal.SIGINT)
            assert node.process.wait(10.0) == 0
            assert node.log.read_text().splitlines()[-1] == line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_node_loads_ends_it_with_a_line(
    number: signal.Signals, model: str, tmp_path: Path
) -> None:
    local = ("--join", "tcp://127.0.0.1:5555", "--model", model)
    node = Node("target_node", tmp_path / "log", *local)
    try:
        assert node.has_said("loading weights")
        node.process.send_signal(number)
        assert node.process.wait(10.0) == 0
    finally:
        node.process.kill()
        node.process.wait()
    how = "interrupted" if number is signal.SIGINT else f"ended by {number.name}"
    assert node.log.read_text().splitlines()[-1] == f"target: {how}"


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


def ends_with(node: Node, line: str) -> bool:
    """Whether it ends because of its user, and says this."""
    return node.process.wait(LIMIT_S) == 2 and line in node.log.read_text().splitlines()[-1]


@pytest.mark.slow
def test_a_node_without_the_right_keys_is_refused_and_ends_and_the_text_goes_on(
    model: str, keys: str, tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    others = tmp_path / "others"
    assert coordinator("keys", "new", str(others)).returncode == 0
    (others / "coordinator.key").write_bytes((Path(keys) / "coordinator.key").read_bytes())
    models = ("--target", model, "--drafter", model)
    remote = ("--nodes", "remote", "--listen", endpoint, "--keys", keys, "--policy", "ar")
    with (
        joined("drafter_node", tmp_path / "d", endpoint, model, "--keys", str(others)) as unknown,
        joined("drafter_node", tmp_path / "e", endpoint, model) as bare,
        joined(
            "target_node", tmp_path / "t", endpoint, model, "--keys", keys, "--simulate-ms", "20"
        ),
    ):
        done = coordinator("generate", *PROMPT, *models, *remote)
        assert done.returncode == 0, done.stderr
        assert "refused a connection" in done.stderr
        assert ends_with(unknown, "does not know this node's key")
        assert ends_with(bare, "takes nobody without keys; give --keys DIR")


@pytest.mark.slow
def test_a_second_drafter_under_a_name_in_use_is_told_so_and_ends(
    model: str, keys: str, tmp_path: Path
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        joined("target_node", tmp_path / "t", endpoint, model, "--keys", keys, *SLOW),
        joined("drafter_node", tmp_path / "d", endpoint, model, "--keys", keys) as one,
        joined("drafter_node", tmp_path / "e", endpoint, model, "--keys", keys) as other,
    ):
        out, errors = start_texts(endpoint, keys, model).communicate(timeout=LIMIT_S)
        assert errors.count("a second process called itself drafter-1 and was turned away") == 1
        assert json.loads(out.removeprefix("begun\n"))[1] > 0, "speculation is dead"
        (second,) = (node for node in (one, other) if node.process.poll() is not None)
        assert ends_with(second, "another process takes part as drafter-1")


SLOW = ("--simulate-ms", "25", "--dtype", "float32")


def start_texts(endpoint: str, keys: str, model: str) -> "subprocess.Popen[str]":
    """Eight texts at once."""
    return subprocess.Popen(
        [sys.executable, "-m", eight_texts.__name__, endpoint, keys, model],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def visit(endpoint: str, folder: str, key: str, name: str) -> None:
    """A stranger with a node's key says, under this name, what would end the node."""
    keys = of_node(Path(folder), key)
    stranger = Connection(endpoint, name.encode(), keys=keys, life=secrets.token_hex(8))
    deadline = time.monotonic() + 5.0
    words = [encode(Fault(0, 0, FaultCode.FAILED, "I am a stranger")), *[b"\xffgarbled"] * 12]
    while words and time.monotonic() < deadline:
        if stranger.send(words[-1]):
            words.pop()
        time.sleep(0.002)
    assert not words, "the stranger was not let in"
    stranger.close()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["drafter-1", "target-1"])
def test_a_stranger_with_a_copied_key_changes_none_of_eight_open_texts(
    model: str, keys: str, tmp_path: Path, key: str
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        joined("target_node", tmp_path / "t", endpoint, model, "--keys", keys, *SLOW),
        joined("drafter_node", tmp_path / "d", endpoint, model, "--keys", keys),
    ):
        undisturbed, why = start_texts(endpoint, keys, model).communicate(timeout=LIMIT_S)
        assert undisturbed, why
        expected, _ = json.loads(undisturbed.removeprefix("begun\n"))
        assert [len(text) for text in expected] == [150] * 8
        num_visits = dict.fromkeys(("drafter-1", "target-1"), 0)
        while min(num_visits.values()) < 10:
            texts = start_texts(endpoint, keys, model)
            assert texts.stdout is not None
            assert texts.stdout.readline() == "begun\n"
            while texts.poll() is None and min(num_visits.values()) < 10:
                for name in num_visits:
                    if texts.poll() is None:
                        visit(endpoint, keys, key, name)
                        num_visits[name] += 1
            out, errors = texts.communicate(timeout=LIMIT_S)
            assert texts.returncode == 0, errors
            made, accepted = json.loads(out)
            assert made == expected
            assert accepted > 0, "speculation is dead"
            assert f"a second process called itself {key} and was turned away" in errors


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


def test_a_coordinator_that_waits_says_what_to_type_and_again_on_ctrl_c(tmp_path: Path) -> None:
    endpoint, log = f"tcp://127.0.0.1:{free_port()}", tmp_path / "log"
    command = ("generate", "--nodes", "remote", "--listen", endpoint, "x")
    invitation = (
        "waiting for the target and the drafter; type on their hosts:\n"
        f"  .venv/bin/python -m target_node --join {endpoint}\n"
        f"  .venv/bin/python -m drafter_node --join {endpoint}\n"
    )
    with log.open("w") as output:
        waiting = subprocess.Popen(
            [sys.executable, "-m", "coordinator", *command],
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
    try:
        assert wait_for(lambda: log.read_text() == invitation, LIMIT_S), log.read_text()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(LIMIT_S) == 130
    finally:
        waiting.kill()
        waiting.wait()
    assert log.read_text() == invitation * 2 + "interrupted\n"


def test_what_cannot_be_joined_is_one_line(keys: str, tmp_path: Path) -> None:
    far = ("--join", "tcp://192.0.2.1:5555")
    assert_one_line(node("target_node", *far), "needs encryption: give --keys DIR")
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
    assert_one_line(generate(*remote), "needs encryption: give --keys DIR")
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
