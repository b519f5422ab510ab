"""Shows what the nodes do until they are ready: a line for each, the target's first.

On a terminal the lines are redrawn while the nodes load. Elsewhere each line is written once, when
its node is ready, and every `REPORT_S` seconds the nodes that are not ready yet get a line. So the
output does not depend on which node was faster.
"""

import re
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from huggingface_hub import try_to_load_from_cache
from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator.api.config import PairConfig
from coordinator.api.models.folders import text_part, weight_bytes
from coordinator.api.models.heads import read
from coordinator.cli.wrapping import WIDTH, continued
from coordinator.cluster.registry import NOT_JOINED
from coordinator.launching.launcher import MODULES
from proto.errors import NodeError
from proto.head_kinds import is_mtp
from proto.installation import IS_CHECKOUT, MODELS
from proto.messages import Role
from proto.node_config import NodeConfig
from proto.system import is_folder, path_of

# -- joining ---------------------------------------------------------------------------------------

# Shows the commands to type on other hosts, while nodes that are started by hand are waited for.

PYTHON = ".venv/bin/python"  # as `make setup` makes it, in the checkout of that host
SAID_AFTER_S = 2.0  # a node that runs already has joined by then
ANY_ADDRESS = r"tcp://(0\.0\.0\.0|\[::\])(:\d+)"
NODE_NUM_SEQS = 8  # texts at once, the default of a node started by hand


@dataclass(slots=True)
class Invitations:
    """The nodes started by hand that a coordinator waits for, and the commands that start them.

    host     the name of this host, for a coordinator that listens at all of its addresses
    keys     folder of the keys; None: no encryption
    configs  the config of each node that is waited for, by role
    since    when each node was first seen as missing
    is_said  the commands have been shown
    """

    host: str
    keys: Path | None = None
    configs: dict[Role, NodeConfig] = field(default_factory=dict)
    since: dict[Role, float] = field(default_factory=dict)
    is_said: bool = False

    def invite(self, config: NodeConfig) -> None:
        """Add a node that is waited for."""
        self.configs[config.role] = config

    def lines(self, states: dict[Role, str], now: float) -> list[str]:
        """Return, once, the lines to show when nodes have not joined for SAID_AFTER_S; else []."""
        missing = [role for role in self.configs if states.get(role) == NOT_JOINED]
        for role in missing:
            self.since.setdefault(role, now)
        if self.is_said or not missing or now - self.since[missing[0]] < SAID_AFTER_S:
            return []
        self.is_said = True
        return self.of(missing)

    def of(self, roles: Iterable[Role]) -> list[str]:
        """Return the lines that say what to type to start nodes of these roles."""
        configs = [self.configs[role] for role in self.configs if role in tuple(roles)]
        if not configs:
            return []
        names = " and ".join(f"the {config.role}" for config in configs)
        whose = "its host" if len(configs) == 1 else "their hosts"
        lines = [
            f"waiting for {names}; type on {whose}:",
            *(
                line
                for config in configs
                for line in continued(f"  {' '.join(map(_quoted, self.command(config)))}", WIDTH)
            ),
        ]
        if self.keys is not None:
            lines.append("(--keys: a folder there with coordinator.key, ROLE.key, ROLE.key_secret)")
        return lines

    def command(self, config: NodeConfig) -> Sequence[str]:
        """Return the words of the command that starts a node with this config."""
        start = [PYTHON, "-m", MODULES[config.role]]
        if not IS_CHECKOUT:
            start = [f"slipstream-{config.role}"]
        words = [*start, "--join", self.endpoint_of(config)]
        words += [] if self.keys is None else ["--keys", str(self.keys)]
        if config.model != str(MODELS / config.role):  # a node's own default, wherever it lies
            words += ["--model", config.model]
        given = {
            "--revision": config.revision,
            "--target": config.target,
            "--target-revision": config.target_revision,
            "--home-drafter": config.home_drafter,
            "--home-revision": config.home_revision,
            "--max-model-len": str(config.max_model_len) if config.max_model_len else "",
        }
        if config.max_num_seqs > NODE_NUM_SEQS:
            given["--max-num-seqs"] = str(config.max_num_seqs)
        for flag, value in given.items():
            words += [flag, value] if value else []
        return words

    def endpoint_of(self, config: NodeConfig) -> str:
        """Return the address at which the node joins."""
        endpoint = config.outside or config.endpoint
        return re.sub(ANY_ADDRESS, rf"tcp://{self.host}\2", endpoint)


def _quoted(word: str) -> str:
    """Return a word quoted for a shell; a leading ~/ stays: another host has another home."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


# -- loading ---------------------------------------------------------------------------------------

ORDER = (Role.TARGET, Role.DRAFTER)
REDRAW_S = 0.2
REPORT_S = 15.0
READY = "ready"  # the state of a node that has loaded


@dataclass(frozen=True, slots=True)
class Model:
    """A model's folder or its name on the hub, as the nodes get it."""

    name: str
    revision: str | None = None

    @property
    def short_name(self) -> str:
        """Return the last part of the name, for people."""
        return Path(self.name).name

    def folder(self) -> Path | None:
        """Return the model's folder on this machine; None if it is not here. Downloads nothing."""
        if is_mtp(self.name):
            return None  # in the target's
        if is_folder(self.name):
            return path_of(self.name)
        try:
            found = try_to_load_from_cache(self.name, "config.json", revision=self.revision)
        except ValueError:  # not a valid name of a model
            return None
        return Path(found).parent if isinstance(found, str) else None


def models_of(pair: PairConfig) -> dict[Role, Model]:
    """Return the models that the nodes of a pair load, by role."""
    return {
        Role.TARGET: Model(pair.target, pair.target_revision),
        Role.DRAFTER: Model(pair.drafter, pair.drafter_revision),
    }


def size_of(model: Model) -> str:
    """Return a model's size in words (bytes, layers) by files on this machine; "": unknown."""
    folder = model.folder()
    if folder is None:
        return ""
    words = []
    try:
        if num_bytes := weight_bytes(folder):
            words.append(shown_bytes(num_bytes))
    except OSError:
        pass  # the node reports what is wrong
    number = text_part(read(folder / "config.json")).get("num_hidden_layers")
    if type(number) is int:
        words.append(f"{number} layers" if number != 1 else "1 layer")
    return ", ".join(words)


def shown_bytes(number: int) -> str:
    """Return a number of bytes for people: 999 kB, 1.8 MB, 29 MB, 16.1 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            value = number / size
            return f"{value:.1f} {unit}" if value < 10 or unit == "GB" else f"{value:.0f} {unit}"
    return f"{number / 1e3:.0f} kB"


@dataclass(slots=True)
class Loading:
    """The progress of a node that loads its model (pure).

    since     when its process was started: seconds of a monotonic clock
    phase     what it is doing now; phase_since: since when
    ready_at  when it became ready; None: it is not ready
    told      a line has said that it is ready
    size      the size of its model in words, once that is known
    """

    since: float
    phase: str = ""
    phase_since: float = 0.0
    ready_at: float | None = None
    told: bool = False
    size: str = ""

    def say(self, phase: str, now: float) -> None:
        """Note what the node is doing now."""
        if phase.partition(",")[0] != self.phase.partition(",")[0]:  # behind it: how much is done
            self.phase_since = now
        self.phase = phase
        if phase.partition(",")[0] == READY and self.ready_at is None:
            self.ready_at = now


@dataclass(slots=True)
class Board:
    """The states of all loading nodes, and the lines that show them (pure).

    models  what the nodes load, as far as that is known
    """

    models: Mapping[Role, Model] = field(default_factory=dict)
    nodes: dict[Role, Loading] = field(default_factory=dict)

    def say(self, states: Mapping[Role, str], now: float) -> None:
        """Note the states of the nodes that are there; nodes not in `states` are removed."""
        for role, phase in states.items():
            self.nodes.setdefault(role, Loading(now)).say(phase, now)
        for role in self.nodes.keys() - states.keys():
            del self.nodes[role]  # the node is gone; its launcher has reported why

    def all_ready(self, now: float) -> None:
        """Mark all nodes as ready, although some may not have reported it yet."""
        for node in self.nodes.values():
            node.say(READY, now)

    def roles(self) -> list[Role]:
        """Return the roles of the nodes, the target first."""
        return [role for role in ORDER if role in self.nodes]

    def line(self, role: Role, now: float) -> str:
        """Return the line of one node, at most 80 columns."""
        node = self.nodes[role]
        if node.ready_at is not None:
            doing = f"ready after {node.ready_at - node.since:.1f} s"
        else:
            doing = f"{node.phase}, {now - node.phase_since:.1f} s"
        start = f"{role:8} {doing:32}"
        model = self.models.get(role)
        about = [model.short_name, node.size] if model is not None else []
        return f"{start} {', '.join(word for word in about if word)}"[:79].rstrip()

    def news(self) -> list[Role]:
        """Return the roles that became ready, and mark them as told; the target comes first."""
        found = []
        for role in self.roles():
            if self.nodes[role].ready_at is None:
                break
            if not self.nodes[role].told:
                self.nodes[role].told = True
                found.append(role)
        return found


class Progress:
    """Shows what the nodes are doing while they load: a context manager around their start."""

    def __init__(
        self,
        console: Console,
        models: Mapping[Role, Model] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._board = Board(models or {})
        self._live: Live | None = None
        self._invitations: Invitations | None = None
        self._drawn_at = self._reported_at = clock()

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if isinstance(error, KeyboardInterrupt | NodeError) and self._invitations is not None:
            nodes = self._board.nodes
            missing = [role for role in nodes if nodes[role].phase == NOT_JOINED]
            self._print(self._invitations.of(missing))
        if error is None:
            now = self._clock()
            self._board.all_ready(now)
            self._measure()
            self._write(self._board.news(), now)

    def invite(self, keys: Path | None, config: NodeConfig) -> None:
        """Wait for a node that a user starts by hand, with the keys in this folder."""
        if self._invitations is None:
            self._invitations = Invitations(socket.gethostname(), keys)
        self._invitations.invite(config)

    def say(self, states: dict[Role, str]) -> None:
        """Show what each node does now; to be called often."""
        now, board = self._clock(), self._board
        if self._invitations is not None:
            self._print(self._invitations.lines(states, now))
        known = {role: node.phase for role, node in board.nodes.items()}
        board.say(states, now)
        is_news = states != known
        if is_news:
            self._measure()
        if self._live is not None:
            if is_news or now - self._drawn_at >= REDRAW_S:
                self._drawn_at = now
                lines = "\n".join(board.line(role, now) for role in board.roles())
                self._live.update(Text(lines, no_wrap=True), refresh=True)
            return
        if is_news:
            self._write(board.news(), now)
        if now - self._reported_at >= REPORT_S:
            self._reported_at = now
            self._write([role for role in board.roles() if board.nodes[role].ready_at is None], now)

    def _measure(self) -> None:
        """Look up the sizes of models again: files may have been downloaded while nodes load."""
        for role, node in self._board.nodes.items():
            if not node.size and role in self._board.models:
                node.size = size_of(self._board.models[role])

    def _write(self, roles: Iterable[Role], now: float) -> None:
        self._print(self._board.line(role, now) for role in roles)

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
