"""The processes that share a model: how rank 0 starts, instructs and watches the other ranks.

A follower (rank from 1 on) is a child process of rank 0. Its standard input is the pipe on which it
gets its calls, and also its *lifeline*: at end of file rank 0 is gone, however it ended, and the
follower ends at once. The ranks add up tensors over NCCL, or over gloo on CPUs, and find each other
by a file that only this user can read.

When a follower ends, rank 0 prints one line and ends too: from the thread that runs the model if
that thread notices, else from the watching thread, since the first may wait in a GPU kernel for
ever. The same happens when a follower is silent for too long (`silence.py`), because it was stopped
or hangs. Then rank 0 kills the followers before it ends, for a stopped process does not see that
its lifeline is closed.
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

from engine import leftovers, running
from engine.checkpoint.files import one_line
from engine.errors import RankError
from engine.tensor_parallel.calls import FAILED, UNUSABLE, Call, Start
from engine.tensor_parallel.layout import shares
from engine.tensor_parallel.silence import BEAT_S, LIMIT_S, LIMIT_WHILE_LOADING_S, Silence
from proto.system import cannot_start

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]  # as in proto/installation.py, unknown in this package
MODULE = "engine.tensor_parallel"
# One rank waits for another in every pass; at load until the other has read its weights as well.
WAIT_LIMIT_S = 600.0
NEWS_LIMIT_S = 2.0  # after communication has failed: wait so long for news of an ended process
GRACE_S = 1.0  # the watching thread waits so long for the model's thread to report the failure
LEAVE_LIMIT_S = 5.0
PART_LIMIT_S = 2.0  # for the process group to end by itself, and again after it is aborted
MAX_READ_BYTES = 1 << 12
_RECORDINGS: list["WeakMethod[Callable[[], None]]"] = []  # methods that drop this process's graphs


@dataclass(frozen=True, slots=True)
class _Follower:
    """A follower's process, the pipe to it, and how messages name it (`words`)."""

    words: str
    process: subprocess.Popen[bytes]
    channel: Connection


class Followers:
    """Rank 0's followers (ranks from 1 on): starts them, sends them calls, watches them.

    count    number of ranks, rank 0 included
    is_told  True while rank 0 runs its own part of a call that it has sent
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None,
        dtype: str,
        devices: Sequence[str],
        max_len: int = 0,
    ) -> None:
        """Start the followers, which load the model at once. Raises RankError if one cannot start.

        devices  device of each rank, rank 0 first
        model, revision, dtype, max_len  as for `load_model`
        """
        self.count = len(devices)
        self.is_told = False
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        leftovers.keep_track_of(self._folder.name)
        self._store = f"{self._folder.name}/store"
        self._is_ending = threading.Event()  # the end is wanted or reported: watchers stay quiet
        self._ended = threading.Event()
        self._failures: list[str] = []
        self._exit: threading.Timer | None = None
        self._limit_s = LIMIT_WHILE_LOADING_S  # longest silence of a follower
        self._followers: list[_Follower] = []
        for rank, device in enumerate(devices[1:], 1):
            words = f"rank {rank} of {self.count} ({device})"
            start = Start(
                *(model, revision, dtype, device, rank, self.count, self._store, os.getpid()),
                max_len=max_len,
            )
            self._followers.append(_started(words, start))
            leftovers.keep_track_of_process(self._followers[-1].process.pid)
        for follower in self._followers:
            threading.Thread(target=self._watch, args=(follower,), daemon=True).start()

    @property
    def rank(self) -> "Rank":
        """Return rank 0, to load its part of the model with."""
        return Rank(0, self.count, _adder(self.failure), self)

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks have loaded their parts. Raises RankError if one fails."""
        try:
            meet(self._store, 0, self.count, device)
        except (RuntimeError, ValueError) as error:
            raise self.failure(error) from error
        self._limit_s = LIMIT_S
        if device.type == "cuda":
            running.wait_at_end(self._let_end)  # after this rank's device: passes need all

    def tell(self, call: Call) -> None:
        """Send a call to every follower, without waiting. Raises RankError if one is gone."""
        data = ForkingPickler.dumps(call)
        try:
            for follower in self._followers:
                follower.channel.send_bytes(data)
        except OSError as error:
            raise self.failure(error) from error

    @contextmanager
    def together(self, call: Call) -> Iterator[None]:
        """Send a call to the followers; rank 0 does its own part inside the `with` block."""
        self.tell(call)
        self.is_told = True
        try:
            yield
        finally:
            self.is_told = False

    def failure(self, error: Exception) -> RankError:
        """Begin to end the process; return the error to raise after communication has failed.

        Waits up to `NEWS_LIMIT_S` seconds for the news which follower has ended. Ends the process
        after `LEAVE_LIMIT_S` seconds if it has not ended by then.
        """
        if not self._ended.wait(NEWS_LIMIT_S):
            self._failures.append(f"the ranks have lost touch: {one_line(error)}")
        self._is_ending.set()
        if self._exit is None:  # where the communication of a GPU does not let this process end
            self._exit = threading.Timer(LEAVE_LIMIT_S, self._leave, (FAILED,))
            self._exit.daemon = True
            self._exit.start()
        return RankError(self._failures[0])

    def close(self) -> None:
        """End the followers, within seconds. May be called twice."""
        self._is_ending.set()
        if self._exit is not None:
            self._exit.cancel()
        for follower in self._followers:
            follower.channel.close()
        _part()  # all at once, or each would wait for the others
        for follower in self._followers:
            leftovers.forget_process(follower.process.pid)
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

    def _let_end(self) -> None:
        """Close the followers' channels and wait until their devices are idle and they have ended.

        Otherwise the operating system would kill them as soon as this process is gone, possibly in
        the middle of a GPU kernel.
        """
        self._is_ending.set()
        for follower in self._followers:
            follower.channel.close()
        for follower in self._followers:
            follower.process.wait()

    def _watch(self, follower: _Follower) -> None:
        """Wait for a follower to end or fall silent, then end this process, unless that was wanted.

        Runs in a thread of its own.
        """
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
            return  # the thread that reported the failure ends the process
        sys.stderr.write(f"{self._failures[0]}\n")
        sys.stderr.flush()
        self._leave(status if status == UNUSABLE else FAILED)

    def _last_words(self, follower: _Follower) -> str | None:
        """Read a follower's output to its end; return the last line, or None if it falls silent.

        Empty lines (heartbeats) are left out.
        """
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
        """Kill the followers and end this process at once, from any thread.

        It does not wait, because a computation with a rank that is gone or hangs never ends.
        """
        for follower in list(self._followers):
            follower.process.kill()
        self._folder.cleanup()
        os._exit(status)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the processes that share a model.

    index, count  number of this rank, and of all ranks: 0 <= index < count
    add_up        replaces a contiguous tensor by its sum over all ranks; every rank must call it
    followers     on rank 0, the other ranks; None on followers
    """

    index: int
    count: int
    add_up: Callable[[torch.Tensor], None]
    followers: Followers | None = None

    def share(self, count: int, unit: int = 1) -> range:
        """Return this rank's part of [0, count), in multiples of `unit` if possible (`shares`)."""
        return shares(count, self.count, unit)[self.index]


def meet(store: str, rank: int, num_ranks: int, device: torch.device) -> None:
    """Join this process to the group of all ranks; each rank calls it once, and it waits for all.

    store  path of a file that all ranks can write

    Raises:
        RuntimeError, ValueError: from torch, if the ranks do not find each other.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on one host
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
    """Register `forget`, which is called before this process leaves the group of ranks.

    forget  bound method that drops recorded CUDA graphs, because they hold on to the group's
            communication; its object is not kept alive
    """
    _RECORDINGS.append(WeakMethod(forget))


def _part() -> None:
    """Leave the group of ranks within seconds, after dropping recordings that NCCL waits for.

    The group is aborted if it does not end by itself: without the other ranks NCCL may wait for
    ever.
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
    """Call `end` and ignore its errors, for the other ranks may be gone already."""
    with suppress(RuntimeError, ValueError, AssertionError):
        end()


def following(start: Start) -> Rank:
    """Return the rank that a follower is, from its first message."""
    return Rank(start.rank, start.num_ranks, _adder(_lost_touch))


def _lost_touch(error: Exception) -> RankError:
    """Return the error of a follower whose communication has failed."""
    return RankError(f"has lost touch with the other ranks: {one_line(error)}")


def _adder(failure: Callable[[Exception], RankError]) -> Callable[[torch.Tensor], None]:
    """Return a function that sums a tensor over all ranks in place; `failure` makes its error."""

    def add_up(tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            raise failure(error) from error

    return add_up


def _started(words: str, start: Start) -> _Follower:
    """Start a follower's process, send it `start`, and return it. Raises RankError if it fails."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        reading, writing = os.pipe()
    except OSError as error:
        raise RankError(f"{words} cannot be started: {cannot_start(error)}") from error
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=reading,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
    except OSError as error:
        os.close(writing)
        raise RankError(f"{words} cannot be started: {cannot_start(error)}") from error
    finally:
        os.close(reading)
    channel = Connection(writing, readable=False)
    with suppress(OSError):  # it has ended already; the watching thread reports why
        channel.send(start)
    return _Follower(words, process, channel)


def _how(status: int) -> str:
    """Return in words how a process with this exit status ended."""
    if status < 0:
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    return f"exited with status {status}"
