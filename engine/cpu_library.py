"""Compile our C++ for this processor, once, and load it.

Torch's own products with weights of few bits reach half of the memory's bandwidth at one row, and
take two to three times as long at eight (docs/decisions.md has the figures); its small operators
take longer to call than to compute. Ours are written for the processor that they run on, so they
are compiled where they run, with g++ or clang++, in some twenty seconds. `make setup` does that
(`python -m engine.cpu_library`); else the first node that starts on a CPU starts a process that
does it, and later starts find the library in the cache. That process ends with the node. What it
has compiled by then, source by source, stays in the cache as object files, and the next start goes
on from there: some starts of a few seconds make the library too. A quantised model, which needs
the library, waits for it.

A process looks for the library once: whether it has one does not change while it loads or runs.

Owns the library. Knows no matrix and no model.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from engine.checkpoint.files import one_line
from engine.host import cpu_flags
from proto.errors import shown
from proto.system import cache_folder

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
# Those that take longest come first (five seconds, three, two, one and one), so that the fewest
# short starts compile all.
SOURCES = (
    _HERE / "quantised/cpu_products_float32.cpp",
    _HERE / "quantised/cpu_products.cpp",
    _HERE / "forward/cpu_attention.cpp",
    _HERE / "choice/cpu_choice.cpp",
    _HERE / "forward/cpu_operators.cpp",
)
# That they include.
_HEADERS = _HERE / "quantised/cpu_products.h", _HERE / "forward/cpu_numbers.h"
NEEDED = {"avx512f", "avx512bw", "avx512vl"}
LIMIT_S = 300.0  # the compiler takes twenty seconds, on a busy machine a minute
RETRY_S = 86_400.0  # so long no start tries again what could not be compiled

_ROOT = Path(__file__).parents[1]
_COMPILERS = ("g++", "clang++", "c++")
# Without contraction, which the compiler may do in one function and not in another that computes
# the same for another number of rows.
_OPTIONS = (
    *("-O3", "-march=native", "-ffp-contract=off"),
    *("-std=c++20", "-fPIC", "-fopenmp"),
)
_BEHIND = "from engine import cpu_library as it; it.end_with_starter(); it.compile_behind()"
_LOCK = "lock"  # held by the process that compiles
_PAUSE_S = 0.1  # between two looks at the lock
_IDLE = 19  # the process that compiles beside a node takes what others leave

_running: list[subprocess.Popen[bytes]] = []  # processes that compile beside this node


# -- the library of this process -------------------------------------------------------------------


def library(*, compiles: bool = True) -> ctypes.CDLL | None:
    """Return the library; None if this process has none.

    compiles  True: compile it if nobody has, and log a warning that says why it cannot be. False:
              take it if it was there when this process first looked
    """
    if not compiles:
        return _kept()
    found, why = made()
    if why is not None:
        _warn(why)
    return found


@cache
def made() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library, compiled now if nobody has; or None and why there is none."""
    why = why_not_here()
    try:
        if why is None:
            found = _loaded(_compiled())
            _kept.cache_clear()
            _path_or_none.cache_clear()
            return found, None
    except (OSError, subprocess.SubprocessError) as error:
        why = _why_not_compiled(error)
    return None, why


@cache
def _warn(why: str) -> None:
    logger.warning("quantised weights are dequantised: %s", why)


@cache
def _kept() -> ctypes.CDLL | None:
    path = _path_or_none()
    try:
        return _loaded(path) if path is not None and path.exists() else None
    except OSError as error:
        logger.warning("the C++ library is not used: %s; remove it", one_line(error))
        return None


@cache
def _path_or_none() -> Path | None:
    try:
        return None if why_not_here() is not None else _path()
    except (OSError, subprocess.SubprocessError):
        return None


def forget() -> None:
    """Look for the library anew at the next call."""
    made.cache_clear()
    _warn.cache_clear()
    _kept.cache_clear()
    _loaded.cache_clear()
    _path_or_none.cache_clear()


def is_kept() -> bool:
    """True if the library was there when this process first looked, or was made by it since."""
    return _kept() is not None


def why_not_used() -> str | None:
    """Return why this process has no library; None: it has one."""
    if is_kept():
        return None
    return why_not_here() or "our C++ is not compiled yet"


def library_name() -> str:
    """Return the name of this process's library, which changes with its sources; "" for none."""
    path = _path_or_none()
    return path.name if path is not None and is_kept() else ""


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


# -- compiling -------------------------------------------------------------------------------------


def why_not_here() -> str | None:
    """Return why the library cannot be compiled here, or None if it can."""
    if missing := NEEDED - cpu_flags():
        return f"this processor has no {', '.join(sorted(missing))}"
    if _compiler() is None and (named := os.environ.get("CXX")):
        return f"CXX names {shown(named)}, which is not there; name a C++ compiler"
    if _compiler() is None:
        return f"there is no C++ compiler ({', '.join(_COMPILERS)}); install one"
    return None


def compile_in_background() -> bool:
    """Start a process that compiles the library for later starts; True if it was started.

    It ends with this process, done or not. None is started if the library is there, cannot be
    compiled here, was tried in vain less than a day ago, or is being compiled by somebody else.
    Never raises.
    """
    path = _path_or_none()
    if path is None or path.exists() or _has_failed(path):
        return False
    with suppress(OSError), (path.parent / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process holds the lock as long as it lives, because it has the same open file. The
        # process group of its own is ended as a whole, with the compiler (`end_with_starter`); in a
        # session of its own its low priority would not count beside this node.
        process = subprocess.Popen(
            [sys.executable, "-c", _BEHIND],
            cwd=_ROOT,
            stdin=subprocess.PIPE,  # closed when this process ends, however it ends
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock.fileno(),),
            process_group=0,
        )
        _running.append(process)
        threading.Thread(
            target=process.wait, daemon=True
        ).start()  # else it stays when it has ended
        return True
    return False


def end_with_starter() -> None:
    """Let this process group end when whoever has started it ends, which closes standard input."""

    def leave(*_: object) -> None:
        raise SystemExit(1)  # on the way out the compiler's folder is removed

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=watch, daemon=True).start()


def compile_behind() -> None:
    """Compile the library beside running nodes; the caller holds the lock.

    A failure is noted in the cache, so that not every start tries again. It is none that the time
    was too short beside a busy node: the next start goes on.
    """
    os.nice(_IDLE)
    with suppress(OSError):  # the node that has started this process may be bound to few cores
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    path = _path()
    try:
        if not path.exists():
            _compile(path)
    except subprocess.TimeoutExpired:
        pass
    except (OSError, subprocess.SubprocessError) as error:
        _failure(path).write_text(_why_not_compiled(error))


def _compiled() -> Path:
    """Return the path of the library, compiled now if nobody has; waits for one who is at it.

    Raises OSError, SubprocessError.
    """
    path = _path()
    if not path.exists():
        with _turn(path.parent / _LOCK):
            if not path.exists():
                _compile(path)
    return path


def _compile(path: Path) -> None:
    """Compile the library to `path`. Raises OSError, SubprocessError.

    Object files that an earlier start has made are not made again. What is no longer needed, also
    of other versions, is removed at the end.
    """
    objects = {source: path.with_name(f"{path.stem}-{source.stem}.o") for source in SOURCES}
    for source, made in objects.items():
        if not made.exists():
            _run_compiler("-c", source, to=made)
    try:
        _run_compiler("-shared", *objects.values(), to=path)
    except subprocess.CalledProcessError:
        if not path.exists():  # else another has made it meanwhile, where no file can be locked
            raise
    for old in (_failure(path), *path.parent.glob("*.o")):
        old.unlink(missing_ok=True)


def _run_compiler(*arguments: str | Path, to: Path) -> None:
    """Make the file `to`, whole or not at all. Raises OSError, SubprocessError."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder) / to.name
        command = [str(_compiler()), *_OPTIONS, *map(str, arguments), "-o", str(made)]
        # A node's own TMPDIR is removed when its coordinator ends, also while this runs.
        subprocess.run(
            command,
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        made.replace(to)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; after `LIMIT_S` seconds, or where no file is locked, go on without.

    Raises OSError: the file cannot be opened.
    """
    deadline = time.monotonic() + LIMIT_S
    with path.open("w") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except OSError:
                break
            else:
                break
        yield


def _failure(path: Path) -> Path:
    """Return where is noted that the library could not be compiled, and why."""
    return path.with_suffix(".failed")


def _has_failed(path: Path) -> bool:
    """True if the library could not be compiled, less than `RETRY_S` seconds ago."""
    with suppress(OSError):
        return time.time() - _failure(path).stat().st_mtime < RETRY_S
    return False


def _why_not_compiled(error: OSError | subprocess.SubprocessError) -> str:
    return f"our C++ cannot be compiled ({_reason(error)}); name another compiler in CXX"


def _reason(error: Exception) -> str:
    """Return why a compiler failed, in its own last words if there are any."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (said or "").strip().splitlines()
    return lines[-1][:120] if lines else one_line(error)


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, _COMPILERS)), None)


def _path() -> Path:
    """Return the path of the library for this processor and compiler.

    Raises OSError, SubprocessError.
    """
    compiler = _compiler()
    assert compiler is not None
    about = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout
    flags = " ".join(sorted(cpu_flags()))
    sources = (source.read_text() for source in (*SOURCES, *_HEADERS))
    key = hashlib.sha256("\0".join((*sources, about, flags, *_OPTIONS)).encode())
    return _folder() / f"cpu-products-{key.hexdigest()[:20]}.so"


def _folder() -> Path:
    """Return the folder of the cache in which the products lie. Raises OSError."""
    folder = cache_folder("products")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(f"others can write to {folder}")
    return folder


def main() -> None:
    """Compile the library if it is not there, and print a line that says how that went.

    The process ends with status 0 in any case: without the library torch's own products run.
    """
    found, why = made()
    if found is None:
        sys.stdout.write(f"models on this CPU use torch's own products: {why}\n")
    else:
        sys.stdout.write(f"the C++ library for models on this CPU: {_path()}\n")


if __name__ == "__main__":
    main()
