"""Chooses the folder that keeps compiled programs (inductor, Triton) from one start to the next.

Nodes that compile (attention and small operators on GPUs) find there what an earlier start has
compiled. torch and Triton would keep their programs below TMPDIR; for a node that is the runtime
folder of its coordinator, which is removed when the coordinator ends. The folder is
$XDG_CACHE_HOME/slipstream/compiled (~/.cache/slipstream/compiled), or what the variables in
`VARIABLES` name. Only this user can write to it, because nodes run the programs that lie there.
"""

import contextlib
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from proto.system import cache_folder

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
MAX_BYTES = 1 << 31
IN_USE_S = 86_400.0  # a younger file may belong to a start that is compiling now


def cache_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Make the cache folders and return the environment variables that name them.

    A variable that the user has set keeps its value, made absolute because a node runs in another
    working directory.

    Raises OSError: a folder cannot be made or written to, or other users can write to it.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if "TORCHINDUCTOR_CACHE_DIR" in given:
        found = {name: os.path.abspath(path) for name, path in given.items()}  # Triton's is inside
    else:
        own = cache_folder("compiled", environment)
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours_alone(own):
            raise PermissionError(f"others can write to {own}")
        trim(own)
        found = {name: str(own / folder) for name, folder in VARIABLES.items()}
        found |= {name: os.path.abspath(path) for name, path in given.items()}
    for folder in found.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written to")
    return found


def _is_ours_alone(folder: Path) -> bool:
    """True if only this user can write to a folder. Raises OSError if it is not there."""
    about = folder.stat()
    return about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o022


def trim(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Remove the oldest files until at most `max_bytes` are left; keep files of the last 24 hours.

    A compiler that misses one of its files compiles anew.
    """
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another start may be trimming
            if stat.S_ISREG((about := path.lstat()).st_mode):
                files.append((about.st_mtime, about.st_size, path))
    too_much = sum(size for _, size, _ in files) - max_bytes
    newest = time.time() - IN_USE_S
    for written_at, size, path in sorted(files):
        if too_much <= 0 or written_at > newest:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            too_much -= size
