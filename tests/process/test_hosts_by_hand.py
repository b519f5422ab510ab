"""Several hosts, and nodes that somebody starts on them. They are namespaces of this machine."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proto.policies import TABLE
from tests.process import hosts as simulated
from tests.process.hosts import Host, Hosts
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
TEXT = ("generate", "--prompt-ids", "5,6,7", "--ignore-eos", "--max-tokens")
SEEDED = ("--temperature", "0.8", "--seed", "11")
DELAYS_MS = (0, 1, 5, 20)


def coordinator(*arguments: str) -> list[str]:
    """Its command line."""
    return [sys.executable, "-m", "coordinator", *arguments]


class ByHand:
    """A coordinator's host, keys, and a model that every host sees."""

    def __init__(self, hosts: Hosts) -> None:
        self.here: Host = hosts["here"]
        self.model = str(make_model("llama", hosts.folder / "llama"))
        keys = str(hosts.folder / "keys")
        made = self.here.run(*coordinator("keys", "new", keys), cwd=ROOT)
        assert made.returncode == 0, made.stderr
        endpoint = f"tcp://{self.here.address}:{PORT}"
        self._join = ("--join", endpoint, "--keys", keys, "--model", self.model)
        self.models = ("--target", self.model, "--drafter", self.model)
        self.remote = ("--nodes", "remote", "--listen", endpoint, "--keys", keys)

    @contextmanager
    def node(self, host: Host, module: str, *more: str) -> Iterator["subprocess.Popen[str]"]:
        """A node on a host."""
        command = (sys.executable, "-m", module, *self._join, *more)
        node = host.start(*command, cwd=ROOT)
        try:
            yield node
        finally:
            node.kill()
            node.communicate()


def test_the_end_of_the_targets_host_is_one_line_within_the_limit_of_silence() -> None:
    with simulated.hosts("here", "there") as pair:
        hand = ByHand(pair)
        with hand.node(pair["there"], "target_node", "--simulate-ms", "100") as target:
            words = coordinator(*TEXT, "300", *hand.models, "--policy", "ar", *hand.remote)
            running = hand.here.start(*words, cwd=ROOT)
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


@pytest.mark.slow
def test_every_policy_writes_the_text_of_one_host_over_slow_links_that_lose_messages() -> None:
    with simulated.hosts("here", "one", "two") as hosts:
        hand = ByHand(hosts)
        text = (*TEXT, "60", *hand.models, "--json")
        wanted = {}
        for sampling in ((), SEEDED):
            alone = coordinator(*text, "--dtype", "float32", "--policy", "ar", *sampling)
            done = hand.here.run(*alone, cwd=ROOT)
            wanted[sampling] = json.loads(done.stdout)["token_ids"]
        one = hand.node(hosts["one"], "target_node", "--dtype", "float32", "--simulate-ms", "15")
        two = hand.node(hosts["two"], "drafter_node", "--dtype", "float32")
        num_accepted = dict.fromkeys((row.name for row in TABLE), 0)
        with one, two:
            for delay_ms in DELAYS_MS:
                links = [
                    f"--link={role}:delay={delay_ms}ms,loss=1%" for role in ("target", "drafter")
                ]
                for policy in num_accepted:
                    for sampling, tokens in wanted.items():
                        words = (*text, *hand.remote, *links, "--policy", policy, *sampling)
                        done = hand.here.run(*coordinator(*words), cwd=ROOT)
                        assert done.returncode == 0, done.stderr
                        made = json.loads(done.stdout)
                        assert made["token_ids"] == tokens, (policy, delay_ms, sampling)
                        num_accepted[policy] += made["metrics"]["num_accepted_tokens"]
        assert {name for name, number in num_accepted.items() if number == 0} == {"ar"}
