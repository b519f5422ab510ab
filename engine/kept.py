"""What was found out about models on this machine, kept for later starts: one table.

At load some things are chosen by timing: a drafter's number type, the number of threads, times of a
pass on other cores. A target is also checked for exactness (`exact.py`). Each costs some tenths of
a second or more, and two starts would choose differently where times are close. So what is
kept is not looked for again. What was timed is kept only if the machine was quiet meanwhile, which
it rarely is for a node that loads beside another one; `tune` lets them load one after the other.

What texts have shown is kept too, for the same pair of models: whether drafts pay at all
(`target_node/remembering.py`).

The table is $XDG_CACHE_HOME/slipstream/choices.json (~/.cache/...): kind, then what it depends on,
then what was found. A file that cannot be read or written costs a second at each start.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch

from engine.cpu_library import library_name
from engine.device import processor
from proto.system import cache_folder

T = TypeVar("T")

FILE = "choices.json"
MOST_KEPT = 1000  # of a kind
QUIET = 0.1  # times are kept if other processes used less than this part of a core meanwhile
_NUM_DIGITS = 12  # of the digest of a machine

Table = dict[str, dict[str, object]]


class Kept:
    """The kept table of this user.

    is_anew  True: find everything again, as if nothing had been kept
    """

    def __init__(self, *, is_anew: bool = False) -> None:
        self._is_anew = is_anew

    def found(
        self,
        kind: str,
        about: Sequence[str],
        find: Callable[[], T],
        is_right: Callable[[object], bool],
        *,
        needs_quiet: bool = True,
    ) -> T:
        """Return what was found before, else what `find` finds now, which is kept.

        kind         what is looked for, in a word
        about        what it depends on, besides processor, torch and our C++ library
        find         finds it; what is not right is not kept
        is_right     True for what may be used: the file is the user's, and may hold anything
        needs_quiet  keep it only if nothing else computed meanwhile
        """
        key = _key(about)
        before = self.before(kind, about)
        if is_right(before):
            return cast(T, before)
        others_s, started = _others_s(), time.perf_counter()
        now = find()
        busy_s, took_s = _others_s() - others_s, time.perf_counter() - started
        if not is_right(now):
            _forget(kind, key)
        elif not needs_quiet or busy_s <= QUIET * took_s:
            _keep(kind, key, now)
        return now

    def before(self, kind: str, about: Sequence[str]) -> object:
        """Return what was kept, which may be anything, as the file is the user's; else None."""
        return None if self._is_anew else _read().get(kind, {}).get(_key(about))

    def keep(self, kind: str, about: Sequence[str], found: object) -> None:
        """Keep this in the place of what was kept before."""
        _keep(kind, _key(about), found)


AS_BEFORE = Kept()


def _key(about: Sequence[str]) -> str:
    return f"{', '.join(filter(None, about))} ({_machine()})"


def _machine() -> str:
    """Return a digest of what computes here."""
    said = processor(), torch.__version__, torch.__config__.show(), library_name()
    return hashlib.sha256(repr(said).encode()).hexdigest()[:_NUM_DIGITS]


def _others_s() -> float:
    """Return the processor seconds of all other processes so far; 0: the system does not say."""
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
        user, nice, system, _, _, *rest = map(int, line.split()[1:9])
    except (OSError, ValueError):
        return 0.0
    ticks = user + nice + system + sum(rest)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def _read() -> Table:
    """Return the table; what is no table is left out."""
    try:
        table = json.loads(cache_folder(FILE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {kind: found for kind, found in table.items() if isinstance(found, dict)}


def _keep(kind: str, key: str, value: object) -> None:
    table = _read()
    of_kind = {name: one for name, one in table.get(kind, {}).items() if name != key}
    of_kind[key] = value
    while len(of_kind) > MOST_KEPT:
        del of_kind[next(iter(of_kind))]
    _write({**table, kind: of_kind})


def _forget(kind: str, key: str) -> None:
    """Leave out what was kept before and is not so any more."""
    table = _read()
    if table.get(kind, {}).pop(key, None) is not None:
        _write(table)


def _write(table: Table) -> None:
    """Write the table; of two nodes that do so at once one has not read what the other writes."""
    with contextlib.suppress(OSError):  # no home, no room: it is found again at the next start
        path = cache_folder(FILE)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(table, indent=1))
        unfinished.replace(path)
