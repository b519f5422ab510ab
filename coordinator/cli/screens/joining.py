"""What to type on the hosts of nodes that are started by hand, while they are waited for (pure)."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.api.models.settings import MODELS
from coordinator.cluster.registry import NOT_JOINED
from coordinator.launching.launcher import MODULES
from proto.messages import Role
from proto.node_config import NodeConfig

PYTHON = ".venv/bin/python"  # as `make setup` makes it, in the checkout of that host
SAID_AFTER_S = 2.0  # a node that is there already has joined by then
ANY_ADDRESS = r"tcp://(0\.0\.0\.0|\[::\])(:\d+)"
NODE_NUM_SEQS = 8  # texts for which a node by hand makes room if it is not told


@dataclass(slots=True)
class Invitations:
    """The nodes by hand that a coordinator waits for.

    host     the name of this one, for whoever listens at all of its addresses
    keys     folder of the keys; None: no encryption
    since    when each was first waited for
    is_said  the commands have been shown
    """

    host: str
    keys: Path | None = None
    configs: dict[Role, NodeConfig] = field(default_factory=dict)
    since: dict[Role, float] = field(default_factory=dict)
    is_said: bool = False

    def invite(self, config: NodeConfig) -> None:
        """One more is waited for."""
        self.configs[config.role] = config

    def lines(self, states: dict[Role, str], now: float) -> list[str]:
        """What is shown when nodes have not joined for a while, once."""
        missing = [role for role in self.configs if states.get(role) == NOT_JOINED]
        for role in missing:
            self.since.setdefault(role, now)
        if self.is_said or not missing or now - self.since[missing[0]] < SAID_AFTER_S:
            return []
        self.is_said = True
        return self.of(missing)

    def of(self, roles: Iterable[Role]) -> list[str]:
        """What to type for these."""
        configs = [self.configs[role] for role in self.configs if role in tuple(roles)]
        if not configs:
            return []
        names = " and ".join(f"the {config.role}" for config in configs)
        whose = "its host" if len(configs) == 1 else "their hosts"
        lines = [
            f"waiting for {names}; type on {whose}:",
            *(f"  {' '.join(map(_quoted, self.command(config)))}" for config in configs),
        ]
        if self.keys is not None:
            lines.append("(--keys: a folder there with coordinator.key, ROLE.key, ROLE.key_secret)")
        return lines

    def command(self, config: NodeConfig) -> Sequence[str]:
        """What starts such a node."""
        words = [PYTHON, "-m", MODULES[config.role], "--join", self.endpoint_of(config)]
        words += [] if self.keys is None else ["--keys", str(self.keys)]
        if config.model != str(MODELS / config.role):  # a node's own default, wherever it lies
            words += ["--model", config.model]
        given = {
            "--revision": config.revision,
            "--target": config.target,
            "--target-revision": config.target_revision,
            "--heads": config.heads,
            "--heads-revision": config.heads_revision,
            "--max-model-len": str(config.max_model_len) if config.max_model_len else "",
        }
        if config.max_num_seqs > NODE_NUM_SEQS:
            given["--max-num-seqs"] = str(config.max_num_seqs)
        for flag, value in given.items():
            words += [flag, value] if value else []
        return words

    def endpoint_of(self, config: NodeConfig) -> str:
        """Where it joins."""
        endpoint = config.outside or config.endpoint
        return re.sub(ANY_ADDRESS, rf"tcp://{self.host}\2", endpoint)


def _quoted(word: str) -> str:
    """For a shell, which may know another home."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)
