"""Hosts on this machine for tests of clusters: real processes, as if on machines of their own.

Each host is a set of namespaces: its own network (on a bridge that they share), processes, mounts
(/tmp, /run, /dev/shm and the home folder are private, the rest is this machine's) and name, with an
sshd. What runs on a host dies with it. Needs root, iproute2, util-linux, openssh-server and rsync.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.process.patience import wait_for

PRIVATE = ("/tmp", "/run", "/dev/shm")
TOOLS = ("ip", "unshare", "nsenter", "mount", "ssh-keygen", "/usr/sbin/sshd", "ssh", "rsync")
NETWORK = "10.77.0"
NUMBERS = count(1)  # of the networks of this process
START_LIMIT_S = 20.0
# $1: the host's name, $2: the folder that all share, $3: what stands in /etc/hosts
BOOT = """
set -e
hostname "$1"
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs none "$2/$1"
mkdir "$2/$1/upper" "$2/$1/work"
printf "$3" > "$2/$1/hosts"
mount -t overlay none -o "lowerdir=$HOME,upperdir=$2/$1/upper,workdir=$2/$1/work" "$HOME"
mount --bind "$2/$1/hosts" /etc/hosts
rm -rf "$HOME/.ssh" "$HOME/.ray"
mkdir -m 700 "$HOME/.ssh" "$HOME/.ray"
cp "$2/authorized" "$HOME/.ssh/authorized_keys"
cp "$2/token" "$HOME/.ray/auth_token"
for private in PRIVATE; do mount -t tmpfs -o mode=1777 none $private; done
mkdir -p /run/sshd
exec /usr/sbin/sshd -D -e -h "$2/$1.hostkey" -o UsePAM=no -o PidFile=none \
  -o PermitRootLogin=yes -o PasswordAuthentication=no -o MaxStartups=100
""".replace("PRIVATE", " ".join(PRIVATE))


def why_not() -> str:
    """Why there cannot be such hosts here; empty: there can."""
    if os.geteuid() != 0:
        return "simulated hosts need root"
    places = (Path(__file__).resolve(), Path(sys.prefix).resolve())
    if any(place.is_relative_to(private) for place in places for private in PRIVATE):
        return f"simulated hosts share no {', '.join(PRIVATE)}, where this repository is"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"simulated hosts need {', '.join(missing)} (apt: iproute2 openssh-server rsync)"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "true"],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else "namespaces are not allowed here"


@dataclass(slots=True)
class Host:
    """One of them. Processes that are started on it see it as their machine."""

    name: str
    address: str
    bridge: str
    boot_command: list[str]
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    init: int = 0  # process id of its first process, seen from outside

    def boot(self) -> None:
        """Start it, or start it again."""
        with self.log.open("w") as log:
            process = self.process = subprocess.Popen(
                self.boot_command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        listens = wait_for(
            lambda: process.poll() is not None or "listening" in self.log.read_text(),
            START_LIMIT_S,
        )
        assert listens, self.log.read_text()
        assert process.poll() is None, self.log.read_text()
        (init,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.init = int(init)

    def command(self, *words: str) -> list[str]:
        """The command line that runs this one on the host."""
        inside = ["nsenter", f"--target={self.init}", "--mount", "--pid", "--net", "--uts", "--ipc"]
        return [*inside, "--", *words]

    def run(
        self, *words: str, limit_s: float = 60.0, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run it to its end."""
        return subprocess.run(
            self.command(*_at(cwd, words)),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def start(
        self, *words: str, cwd: Path | None = None, errors: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Start it. What it says of itself goes into the file, if there is one."""
        with nullcontext(subprocess.PIPE) if errors is None else errors.open("w") as stderr:
            return subprocess.Popen(
                self.command(*_at(cwd, words)),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def kill(self) -> None:
        """Every process of it: the kernel ends them with the first. May be called twice."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.init, signal.SIGKILL)
            self.end()

    def end(self) -> None:
        """Nothing of it is left afterwards, but for its network."""
        if self.process is not None:
            self.process.kill()  # with --kill-child its first process goes, and so all others
            self.process.wait()
            time.sleep(0.1)

    def set_link(self, *, is_up: bool) -> None:
        """Plug the host's cable in, or pull it."""
        state = "up" if is_up else "down"
        _ip("-n", self.bridge, "link", "set", f"v-{self.name}", state)


def _at(cwd: Path | None, words: Sequence[str]) -> list[str]:
    return list(words) if cwd is None else ["env", f"--chdir={cwd}", *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(slots=True)
class Hosts:
    """All of them, by name, and the folder that they share."""

    folder: Path
    by_name: dict[str, Host] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Host:
        return self.by_name[name]

    @property
    def key(self) -> Path:
        """The private key that every host's sshd takes."""
        return self.folder / "key"


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts of these names; afterwards nothing of them is left."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="slip-", dir="/var/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for key in ("key", *(f"{name}.hostkey" for name in names)):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True
            )
        shutil.copy(folder / "key.pub", folder / "authorized")
        (folder / "token").write_text(os.urandom(16).hex())
        bridge = f"slip-{os.getpid()}-{next(NUMBERS)}"
        _ip("netns", "add", bridge)
        stack.callback(_ip, "netns", "del", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        made = Hosts(folder)
        addresses = {name: f"{NETWORK}.{index}" for index, name in enumerate(names, 1)}
        table = "127.0.0.1 localhost\\n" + "".join(
            f"{address} {name}\\n" for name, address in addresses.items()
        )
        for name, address in addresses.items():
            made.by_name[name] = stack.enter_context(_host(name, address, bridge, folder, table))
        yield made


@contextmanager
def _host(name: str, address: str, bridge: str, folder: Path, table: str) -> Iterator[Host]:
    space = f"{bridge}-{name}"
    with ExitStack() as stack:
        _ip("netns", "add", space)
        stack.callback(_ip, "netns", "del", space)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "add", f"v-{name}", "netns", bridge, *cable)
        _ip("-n", bridge, "link", "set", f"v-{name}", "master", "bridge", "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", space, "link", "set", device, "up")
        (folder / name).mkdir()
        spaces = ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        boot = ["bash", "-c", BOOT, "boot", name, str(folder), table]
        command = ["ip", "netns", "exec", space, "unshare", *spaces, *boot]
        host = Host(name, address, bridge, command, folder / f"{name}.log")
        stack.callback(host.end)
        host.boot()
        yield host
