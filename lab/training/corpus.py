"""The sources of Python's standard library: a text to learn from that is on every machine.

A hash of each file's path says which are held out. It knows neither tokens nor models.
"""

import hashlib
import sysconfig
from pathlib import Path

HELD_OUT_PERCENT = 5
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def is_held_out(relative_path: str) -> bool:
    """True if this file of the standard library is held out of training, by a hash of its path."""
    digest = hashlib.sha256(relative_path.encode()).hexdigest()
    return int(digest[:8], 16) % 100 < HELD_OUT_PERCENT


def library_texts(*, held_out: bool) -> list[str]:
    """Return the texts of the standard library's files, without its tests, ordered by path.

    held_out  True: the held-out files; False: the training files
    """
    root, texts = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        skipped = SKIPPED_FOLDERS.intersection(relative.parts)
        # The build settings of one installation are not source, and hold that machine's paths.
        generated = relative.name.startswith("_sysconfigdata") or "config-" in relative.parts[0]
        if not skipped and not generated and is_held_out(relative.as_posix()) == held_out:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return list(filter(None, texts))
