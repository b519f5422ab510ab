"""Compile our C++ for this processor, once, and load it.

Torch's own products with weights of few bits reach half of the memory's bandwidth at one row, and
take two to three times as long at eight (docs/decisions.md has the figures); its small operators
take longer to call than to compute. Ours are written for the processor that they run on, so they
are compiled where they run, with g++ or clang++, in some twenty seconds. Later starts find the
library in the cache.

Owns the library. Knows no matrix and no model.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from engine.checkpoint.files import one_line
from engine.device import cpu_flags
from proto.errors import shown
from proto.system import cache_folder

logger = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).parent / name
    for name in ("quantised/cpu_products.cpp", "forward/cpu_operators.cpp")
)
NEEDED = {"avx512f", "avx512bw", "avx512vl"}
LIMIT_S = 300.0  # the compiler takes twenty seconds, on a busy machine a minute

_COMPILERS = ("g++", "clang++", "c++")
_OPTIONS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-fopenmp")


def library(*, compiles: bool = True) -> ctypes.CDLL | None:
    """Return the library; None if there is none here.

    compiles  True: compile it if no earlier start has, and log a warning that says why it cannot
              be. False: take it from the cache or not at all
    """
    if not compiles:
        return _kept()
    found, why = made()
    if why is not None:
        _warn(why)
    return found


@cache
def made() -> tuple[ctypes.CDLL | None, str | None]:
    """Return the library, compiled if no earlier start has; or None and why not."""
    why = why_not_here()
    try:
        if why is None:
            return _loaded(_compiled()), None
    except (OSError, subprocess.SubprocessError) as error:
        files = " and ".join(source.name for source in SOURCES)
        why = f"{files} cannot be compiled ({_reason(error)}); name another compiler in CXX"
    return None, why


@cache
def _warn(why: str) -> None:
    logger.warning("quantised weights are dequantised: %s", why)


def _kept() -> ctypes.CDLL | None:
    path = _path_or_none()
    return _loaded(path) if path is not None and path.exists() else None


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
    _loaded.cache_clear()
    _path_or_none.cache_clear()


def is_kept() -> bool:
    """True if an earlier start has compiled the library."""
    return _kept() is not None


def library_name() -> str:
    """Return the name of the library's file, which changes with its sources; "": there is none."""
    path = _path_or_none()
    return "" if path is None else path.name


def why_not_here() -> str | None:
    """Return why the library cannot be compiled here, or None if it can."""
    if missing := NEEDED - cpu_flags():
        return f"this processor has no {', '.join(sorted(missing))}"
    if _compiler() is None and (named := os.environ.get("CXX")):
        return f"CXX names {shown(named)}, which is not there; name a C++ compiler"
    if _compiler() is None:
        return f"there is no C++ compiler ({', '.join(_COMPILERS)}); install one"
    return None


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
    sources = (source.read_text() for source in SOURCES)
    key = hashlib.sha256("\0".join((*sources, about, flags, *_OPTIONS)).encode())
    return _folder() / f"cpu-products-{key.hexdigest()[:20]}.so"


def _compiled() -> Path:
    """Return the path of the library, compiled now if an earlier start has not.

    Raises OSError, SubprocessError.
    """
    path = _path()
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [str(_compiler()), *_OPTIONS, *map(str, SOURCES), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
            made.replace(path)  # whole or not at all, whoever else compiles at the same time
    return path


def _folder() -> Path:
    """Return the folder of the cache in which the products lie. Raises OSError."""
    folder = cache_folder("products")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise PermissionError(f"others can write to {folder}")
    return folder


@cache
def _loaded(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
