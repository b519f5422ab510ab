"""Several hosts, and nodes that somebody starts on them. They are namespaces of this machine."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proto.policies import TABLE
from tests.process import hosts as simulated
from tests.process import policies_over_links
from tests.process.hosts import Host, Hosts
from tests.process.policies_over_links import NUM_TOKENS, SEED, TEMPERATURES
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
        self.place = (endpoint, keys)
        self._join = ("--join", endpoint, "--keys", keys, "--model", self.model)
        self.models = ("--target", self.model, "--drafter", self.model)
        self.remote = ("--nodes", "remote", "--listen", endpoint, "--keys", keys)

    @contextmanager
    def node(self, host: Host, module: str, *more: str) -> Iterator["subprocess.Popen[str]"]:
        """A node on a host, with which it ends."""
        command = (sys.executable, "-m", module, *self._join, *more)
        with host.start(*command, cwd=ROOT) as node:
            try:
                yield node
            finally:
                host.kill()


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
        assert any("ms there and back" in line for line in lines[:-1])
        assert lines[-1].startswith("error: "), said
        assert "target" in lines[-1]


@pytest.mark.slow
def test_every_policy_writes_the_text_of_one_host_over_slow_links_that_lose_messages() -> None:
    with simulated.hosts("here", "one", "two") as hosts:
        hand = ByHand(hosts)
        wanted = {}
        for temperature in TEMPERATURES:
            text = (*TEXT, str(NUM_TOKENS), *hand.models, "--json", "--policy", "ar")
            sampling = ("--temperature", str(temperature), "--seed", str(SEED))
            done = hand.here.run(*coordinator(*text, "--dtype", "float32", *sampling), cwd=ROOT)
            wanted[temperature] = json.loads(done.stdout)["token_ids"]
        assert len({tuple(tokens) for tokens in wanted.values()}) == len(TEMPERATURES)
        one = hand.node(hosts["one"], "target_node", "--dtype", "float32", "--simulate-ms", "15")
        two = hand.node(hosts["two"], "drafter_node", "--dtype", "float32")
        num_accepted: Counter[str] = Counter()
        with one, two:
            for delay_ms in DELAYS_MS:
                words = (*hand.place, hand.model, str(delay_ms))
                command = (sys.executable, "-m", policies_over_links.__name__, *words)
                done = hand.here.run(*command, cwd=ROOT, limit_s=LIMIT_S)
                assert done.returncode == 0, done.stderr
                for policy, temperature, tokens, accepted in json.loads(done.stdout):
                    assert tokens == wanted[temperature], (policy, delay_ms, temperature)
                    num_accepted[policy] += accepted
        assert {name for name, number in num_accepted.items() if number == 0} == {"ar"}
        assert len(num_accepted) == len(TABLE)
