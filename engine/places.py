"""Moves the threads of a target's process between CPU cores, or changes their number.

Which place a pass runs on is decided elsewhere, from measured times (`node/placing.py`). This
module times passes on both at load, which later starts need not do (`kept.py`), and moves the
threads.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from statistics import quantiles

import torch

from engine.device import cores_of
from engine.errors import ModelError
from engine.executor import Executor
from engine.kept import Kept
from engine.layout.slots import Feed
from engine.timing import Seconds

LIMIT_S = 2.0  # most seconds that timing may take
ROWS = (1, 5)  # rows of the passes that are timed: without drafts, and with
_TURN_S = 0.05  # the places take turns of at least so many seconds
_CONTEXT = 8


class Places:
    """The two ways in which this process may run its passes: 0 and 1.

    With more cores at hand these are its own (0) and all of the pair (1). Without, they differ in
    the number of threads alone: one less than there are cores (0) leaves room for other work.

    names     what the devices are called
    measured  seconds of a pass by its rows, for each place; {}: they were not timed
    """

    def __init__(self, own: str, shared: str) -> None:
        """Take the devices' names; "" for `shared`: the process keeps its cores.

        It is on its own cores with its usual threads now.
        """
        num_own, cores = torch.get_num_threads(), cores_of(own) or os.sched_getaffinity(0)
        if shared:
            more = cores_of(shared)
            self._cores = cores, more
            self._threads = num_own, num_own + len(more) - len(cores)
            self._place = 0
        else:
            self._cores = cores, cores
            self._threads = num_own - 1, num_own
            self._place = 1
        self.has_more_cores = bool(shared)
        self.names = own, shared or own
        self.measured: tuple[Seconds, Seconds] = {}, {}

    def go(self, place: int) -> None:
        """Let the next pass run on this place; does nothing if the last one did.

        All threads move, because each has a set of cores of its own.
        """
        if place == self._place:
            return
        self._place = place
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), self._cores[place])
        torch.set_num_threads(self._threads[place])


def places_of(own: str, shared: str) -> Places | None:
    """Return the places of a process on the cores `own` that may use `shared`; None: no choice.

    shared  "": it may use no others

    There is no choice where a model is fastest on fewer threads than it has cores, where one core
    is all there is, and where this process may not use the other cores.
    """
    num_threads = torch.get_num_threads()
    if num_threads < len(cores_of(own)) or (num_threads == 1 and not shared):
        return None
    if shared and not cores_of(own):
        return None
    try:
        places = Places(own, shared)
        places.go(1)
    except (OSError, ModelError):  # the first thread has not moved, so none has
        return None
    if shared:
        places.go(0)
    return places


def time_places(
    places: Places, executor: Executor, own_s: Seconds, about: Sequence[str], kept: Kept
) -> None:
    """Time passes on both places, or take the times of an earlier start, into `places.measured`.

    own_s  seconds of passes by rows on the own cores, as timed before
    about  what the times depend on, besides this machine, torch and the cores
    kept   the times of earlier starts
    """
    if own_s.get(ROWS[0], 0.0) * 4 * len(ROWS) > LIMIT_S:
        return  # one pass each would take too long; the first texts show it
    about = (*about, f"threads {torch.get_num_threads()}", " or ".join(places.names))
    found = kept.found("places", about, lambda: _timed(places, executor), _is_times)
    places.measured = _filled(found[0], own_s), _filled(found[1], own_s, found[0])


def _timed(places: Places, executor: Executor) -> list[list[float]]:
    """Return the seconds of passes of `ROWS` rows on each place; the places take turns.

    Not by `fewest_seconds`: a turn has many passes, because caches are cold after a move, and the
    lower quartile counts, because the other node may still be loading, which only adds time.
    """
    spent: dict[tuple[int, int], list[float]] = {(place, n): [] for place in (0, 1) for n in ROWS}
    context = min(_CONTEXT, executor.capacity - max(ROWS))
    before = tuple(range(context))
    executor.run(Feed(before, before, before, 0, None), ())
    until = time.perf_counter() + LIMIT_S / 2
    num_turns = 0
    while num_turns < 2 or (time.perf_counter() < until and num_turns < 4):
        num_turns += 1
        for (place, num_rows), seconds in spent.items():
            places.go(place)
            feed = Feed.chain(0, num_rows, start=context)
            executor.run(feed, range(num_rows))  # not counted: caches are cold
            end = time.perf_counter() + _TURN_S
            while True:  # one pass at least, however late this process gets its core back
                started = time.perf_counter()
                executor.run(feed, range(num_rows))
                ended = time.perf_counter()
                seconds.append(ended - started)
                if ended >= end:
                    break
    places.go(0)
    return [[_lower(spent[place, num_rows]) for num_rows in ROWS] for place in (0, 1)]


def _lower(seconds: Sequence[float]) -> float:
    """Return the lower quartile; of very few numbers not less than their least one."""
    return quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def _filled(timed: Sequence[float], own_s: Seconds, base: Sequence[float] = ()) -> Seconds:
    """Return the seconds of passes of all rows in `own_s` on a place where `ROWS` were timed.

    base  the times on the own cores, if these are not those: others are scaled in proportion
    """
    known = dict(zip(ROWS, timed, strict=True))
    if not base:
        return {**own_s, **known}
    ratios = [there / here for there, here in zip(timed, base, strict=True)]
    middle = sum(ratios) / len(ratios)
    scaled = {
        rows: seconds * (ratios[-1] if rows > ROWS[-1] else middle)
        for rows, seconds in own_s.items()
    }
    return {**scaled, **known}


def _is_times(times: object) -> bool:
    """True if this is a list of two lists, each of positive seconds for `ROWS`."""
    return (
        isinstance(times, list)
        and len(times) == 2
        and all(
            isinstance(one, list)
            and len(one) == len(ROWS)
            and all(isinstance(seconds, float) and 0 < seconds < 1e6 for seconds in one)
            for one in times
        )
    )
