"""Downloads files of models from the hub before a node starts, and reports the progress.

The nodes then find the files on this machine. So the time limit for their start does not run during
a download, and Ctrl-C ends it at once. The hub's library shows progress bars of its own; it is
given the class `_Bar` for them, which shows nothing and counts bytes. Errors of the library are not
caught here.
"""

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from proto.errors import ModelError

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 5.0
SAY_S = 0.2  # between two reports of the progress
RATE_OVER_S = 5.0
STALL_LIMIT_S = 600.0  # longest time without a new chunk; some chunks have 10 MB

Say = Callable[[str], None]  # is called with a few words on the progress


@dataclass(frozen=True, slots=True)
class Download:
    """A download to do: a name on the hub, its revision, and patterns of its files."""

    name: str
    revision: str | None
    wanted: Sequence[str]
    not_wanted: Sequence[str] = ()

    def run(self, say: Say | None = None) -> Path:
        """Download the missing files; return the folder. Raises ModelError if it stalls."""
        num_bytes = self._num_bytes()
        if not num_bytes:
            return Path(self._snapshot())
        self._check_space(num_bytes)
        if say is None:
            logger.warning("fetching %s: %s", self.name, _shown(num_bytes))
        count = Count(num_bytes)
        return _watched(lambda: str(self._snapshot(count)), self.name, count, say)

    def _check_space(self, num_bytes: int) -> None:
        from huggingface_hub.constants import HF_HUB_CACHE

        place = next(
            one for one in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if one.exists()
        )
        if (free := shutil.disk_usage(place).free) < num_bytes:
            raise ModelError(
                f"{self.name}: {_shown(num_bytes)} are to be fetched, and {place} has room for "
                f"{_shown(free)}; make room, or set HF_HOME to a folder elsewhere"
            )

    def _num_bytes(self) -> int:
        """Return the size of the missing files; 0 also if the hub cannot be reached."""
        from huggingface_hub.errors import DryRunError

        try:
            files = self._snapshot(dry_run=True)
        except DryRunError:
            return 0  # there may be a local copy
        return sum(file.file_size or 0 for file in files if file.will_download)

    def _snapshot(self, count: "Count | None" = None, **options: Any) -> Any:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            self.name,
            revision=self.revision,
            allow_patterns=list(self.wanted),
            ignore_patterns=list(self.not_wanted),
            etag_timeout=HUB_TIMEOUT_S,
            tqdm_class=_bars_of(count or Count(0)),
            **options,
        )


class Stopped(Exception):
    """Raised in the download's thread when nobody waits for the download any more."""


@dataclass(slots=True)
class Count:
    """Counts the bytes of a download; the threads of the hub's library add to it.

    total  number of bytes to download
    """

    total: int
    is_stopped: bool = False
    _bars: "list[_Bar]" = field(default_factory=list)
    _seen: deque[tuple[float, int]] = field(default_factory=deque)  # (time, bytes), ascending

    def watch(self, bar: "_Bar") -> None:
        """Add a progress bar of bytes; the library has one for received, one for written."""
        self._bars.append(bar)

    @property
    def done(self) -> int:
        """Return the number of bytes received so far."""
        return min(self.total, max((bar.n for bar in self._bars), default=0))

    def words(self, now: float) -> str:
        """Note the progress at `now`; return it in words: bytes done, total, and recent speed."""
        self._seen.append((now, self.done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_OVER_S:
            self._seen.popleft()
        (then, before), (_, done) = self._seen[0], self._seen[-1]
        rate = f", {_shown((done - before) / (now - then))}/s" if now > then else ""
        of, unit = _shown(self.total).split()
        size = _UNITS[unit]
        return f"fetching {done / size:.{0 if size < 1e9 else 1}f} of {of} {unit}{rate}"


class _Bar:
    """Takes the place of a tqdm bar in the hub's library. It counts and shows nothing."""

    _count: Count  # a class attribute, set by `_bars_of`

    def __init__(self, *_: object, **options: Any) -> None:
        self.total = options.get("total")
        self.n: int = options.get("initial", 0)
        self.format_dict: dict[str, Any] = {"rate": None}
        self._lock = threading.Lock()
        if options.get("unit") == "B":
            self._count.watch(self)

    def update(self, number: float | None = 1) -> None:
        """Add `number` to the count. Raises Stopped where the download is to end."""
        if self._count.is_stopped:
            raise Stopped
        with self._lock:
            self.n += int(number or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith(("set_", "refresh", "close", "clear", "reset")):
            return lambda *_, **__: None  # methods that change only how a bar looks
        raise AttributeError(name)


def _bars_of(count: Count) -> type[_Bar]:
    return type("Bar", (_Bar,), {"_count": count})


def _watched(download: Callable[[], str], name: str, count: Count, say: Say | None) -> Path:
    """Run a download in a thread, report progress; return its path. Raises ModelError."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="fetching")
    running = threads.submit(download)
    moved_at, before = time.monotonic(), 0
    try:
        while not running.done():
            now = time.monotonic()
            if count.done != before:
                moved_at, before = now, count.done
            if now - moved_at > STALL_LIMIT_S:
                raise ModelError(
                    f"{name}: nothing has come from the hub for {STALL_LIMIT_S:.0f} s; run the "
                    "same command again, it goes on from there"
                )
            if say is not None:
                say(count.words(now))
            wait([running], SAY_S)
    finally:
        count.is_stopped = True
        threads.shutdown(wait=False)
    return Path(running.result())


_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


def _shown(number: float) -> str:
    """Return a number of bytes for people: 16.4 GB, 85 MB, 3 kB."""
    unit, size = next(((u, s) for u, s in _UNITS.items() if number >= s), ("kB", 1e3))
    return f"{number / size:.{1 if unit == 'GB' else 0}f} {unit}"
