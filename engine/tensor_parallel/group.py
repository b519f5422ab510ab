"""The processes that share a model: how rank 0 starts, tells and watches the others.

A follower is a child of rank 0. Its standard input is the pipe on which it is told what to do, and
its *lifeline*: at the end of file rank 0 is gone, however it ended, and the follower ends at once.
What ranks compute together they add up over NCCL, or over gloo on CPUs, and find each other by a
file that only this user can read.

A follower that ends takes rank 0 with it, with one line: in the thread that runs the model where
that notices, or else, since it may wait in a kernel of a GPU for ever, in the one that watches. So
does one that is silent (`silence.py`), because it was stopped or its process hangs: rank 0 kills
the others before it ends, since such a one does not see that its lifeline is closed.
"""

import atexit
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from engine import leftovers
from engine.checkpoint.files import one_line
from engine.errors import RankError, without_room
from engine.tensor_parallel.calls import FAILED, UNUSABLE, Call, Start
from engine.tensor_parallel.layout import shares
from engine.tensor_parallel.silence import BEAT_S, LIMIT_S, LIMIT_WHILE_LOADING_S, Silence

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]  # as in proto/installation.py, which is unknown here
MODULE = "engine.tensor_parallel"
# One rank waits for another in every pass; at load until the other has read its weights as well.
WAIT_LIMIT_S = 600.0
NEWS_LIMIT_S = 2.0  # after a sum has failed: until the end of a process is noticed
GRACE_S = 1.0  # for the thread that runs the model to say it
LEAVE_LIMIT_S = 5.0
PART_LIMIT_S = 2.0  # for the group to end by itself, and again when it is broken off
MAX_READ_BYTES = 1 << 12
_RECORDINGS: list["WeakMethod[Callable[[], None]]"] = []  # what drops those of this process


@dataclass(frozen=True, slots=True)
class _Follower:
    """A process that was started, and the pipe to it."""

    words: str
    process: subprocess.Popen[bytes]
    channel: Connection


class Followers:
    """The ranks from 1 on, as rank 0 sees them. They load the model at once.

    is_told  a call has been told, and rank 0 runs its own part
    """

    def __init__(
        self, model: str, *, revision: str | None, dtype: str, devices: Sequence[str]
    ) -> None:
        """`devices` of all ranks, rank 0 first; the rest as for `load_model`."""
        self.count = len(devices)
        self.is_told = False
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        leftovers.keep_track_of(self._folder.name)
        self._store = f"{self._folder.name}/store"
        self._is_ending = threading.Event()  # wanted, or said: the watchers have nothing to say
        self._ended = threading.Event()
        self._failures: list[str] = []
        self._exit: threading.Timer | None = None
        self._limit_s = LIMIT_WHILE_LOADING_S  # of a follower's silence
        self._followers: list[_Follower] = []
        for rank, device in enumerate(devices[1:], 1):
            words = f"rank {rank} of {self.count} ({device})"
            start = Start(
                model, revision, dtype, device, rank, self.count, self._store, os.getpid()
            )
            self._followers.append(_started(words, start))
        for follower in self._followers:
            threading.Thread(target=self._watch, args=(follower,), daemon=True).start()

    @property
    def rank(self) -> "Rank":
        """Rank 0, as its model sees it."""
        return Rank(0, self.count, _adder(self.failure), self)

    def meet(self, device: torch.device) -> None:
        """Wait until all have loaded. Raises RankError."""
        try:
            meet(self._store, 0, self.count, device)
        except (RuntimeError, ValueError) as error:
            raise self.failure(error) from error
        self._limit_s = LIMIT_S

    def tell(self, call: Call) -> None:
        """Let every follower do its part of a call. Raises RankError."""
        data = ForkingPickler.dumps(call)
        try:
            for follower in self._followers:
                follower.channel.send_bytes(data)
        except OSError as error:
            raise self.failure(error) from error

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        """Let them do their part, while rank 0 does its own in the `with` block."""
        self.tell(call)
        self.is_told = True
        try:
            yield
        finally:
            self.is_told = False

    def failure(self, error: Exception) -> RankError:
        """Return what to raise where the ranks cannot go on together."""
        if not self._ended.wait(NEWS_LIMIT_S):
            self._failures.append(f"the ranks have lost touch: {one_line(error)}")
        self._is_ending.set()
        if self._exit is None:  # where the communication of a GPU does not let this process end
            self._exit = threading.Timer(LEAVE_LIMIT_S, self._leave, (FAILED,))
            self._exit.daemon = True
            self._exit.start()
        return RankError(self._failures[0])

    def close(self) -> None:
        """End them, within seconds. May be called twice."""
        self._is_ending.set()
        if self._exit is not None:
            self._exit.cancel()
        for follower in self._followers:
            follower.channel.close()
        _part()  # all at once, or each would wait for the others
        for insist in (None, signal.SIGKILL):
            for follower in self._followers:
                if insist is not None:
                    follower.process.send_signal(insist)
                try:
                    follower.process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    continue
        self._followers = []
        self._folder.cleanup()
        leftovers.forget(self._folder.name)

    def _watch(self, follower: _Follower) -> None:
        """In a thread: wait for its end, and end this process too, unless that was wanted."""
        last = self._last_words(follower)
        if last is None:
            status, why = FAILED, f"has been silent for {self._limit_s:.0f} s"
        else:
            status = follower.process.wait()
            why = last or _how(status)
        if not self._is_ending.is_set():
            self._failures.append(f"{follower.words} {why}")
            self._ended.set()
        if self._is_ending.wait(GRACE_S):
            return  # who said it ends the process
        sys.stderr.write(f"{self._failures[0]}\n")
        sys.stderr.flush()
        self._leave(status if status == UNUSABLE else FAILED)

    def _last_words(self, follower: _Follower) -> str | None:
        """Its last line that is not empty, once it has said all; None: it is silent."""
        assert follower.process.stdout is not None
        output, silence, said = follower.process.stdout.fileno(), Silence(time.monotonic()), b""
        lines = select.poll()
        lines.register(output, select.POLLIN)
        while silence.seconds <= self._limit_s:
            if lines.poll(BEAT_S * 1000):
                if not (data := os.read(output, MAX_READ_BYTES)):
                    return said.strip().rpartition(b"\n")[2].decode(errors="replace").strip()
                said = (said + data).lstrip()[-MAX_READ_BYTES:]
                silence.heard()
            silence.passes(time.monotonic())
        return None

    def _leave(self, status: int) -> None:
        """End this process and the others, from any thread."""
        for follower in list(self._followers):
            follower.process.kill()
        self._folder.cleanup()
        os._exit(status)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that share a model.

    index, count  0 <= index < count
    add_up        replace a contiguous tensor by its sum over all ranks; every rank calls it
    followers     of rank 0: the other ranks
    """

    index: int
    count: int
    add_up: Callable[[torch.Tensor], None]
    followers: Followers | None = None

    def share(self, count: int, unit: int = 1) -> range:
        """What this rank has of so many."""
        return shares(count, self.count, unit)[self.index]


def meet(store: str, rank: int, num_ranks: int, device: torch.device) -> None:
    """Let this process find the other ranks, which all call this once.

    store  a file that all can write

    Raises RuntimeError or ValueError as torch does.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are on one host
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=WAIT_LIMIT_S),
        device_id=device if on_gpu else None,
    )
    atexit.register(_part)  # or threads of the group abort the process at its end


def before_parting(forget: Callable[[], None]) -> None:
    """Call this before the ranks part: recordings hold on to what they add up with.

    forget  drops recordings; a bound method does not keep its object alive
    """
    _RECORDINGS.append(WeakMethod(forget))


def _part() -> None:
    """Leave the group: without recordings, which NCCL would wait for, and within seconds.

    A rank whose others are gone may wait in NCCL for ever.
    """
    for found in _RECORDINGS:
        if (forget := found()) is not None:
            forget()
    _RECORDINGS.clear()
    if not dist.is_initialized():
        return
    for end in (dist.destroy_process_group, distributed_c10d._abort_process_group):
        leaving = threading.Thread(target=_without_a_word, args=(end,), daemon=True)
        leaving.start()
        leaving.join(PART_LIMIT_S)
        if not leaving.is_alive():
            return
    logger.warning("the ranks' communication did not end in %.0f s", 2 * PART_LIMIT_S)


def _without_a_word(end: Callable[[], None]) -> None:
    """The others may have gone already, and there is nothing that anybody could do about it."""
    with suppress(RuntimeError, ValueError, AssertionError):
        end()


def following(start: Start) -> Rank:
    """The rank of a follower."""
    return Rank(start.rank, start.num_ranks, _adder(_lost_touch))


def _lost_touch(error: Exception) -> RankError:
    return RankError(f"has lost touch with the other ranks: {one_line(error)}")


def _adder(failure: Callable[[Exception], RankError]) -> Callable[[torch.Tensor], None]:
    """Return what adds a tensor up over all ranks; `failure` makes its error."""

    def add_up(tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise failure(error) from error

    return add_up


def _started(words: str, start: Start) -> _Follower:
    """Start a follower. Raises RankError."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        reading, writing = os.pipe()
    except OSError as error:
        raise RankError(f"{words} cannot be started: {without_room(error)}") from error
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=reading,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        os.close(writing)
        raise RankError(f"{words} cannot be started: {without_room(error)}") from error
    finally:
        os.close(reading)
    channel = Connection(writing, readable=False)
    with suppress(OSError):  # it has ended already, and whoever watches it says why
        channel.send(start)
    return _Follower(words, process, channel)


def _how(status: int) -> str:
    if status < 0:
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    return f"exited with status {status}"
