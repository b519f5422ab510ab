"""Where files are kept from one start to the next: in $XDG_CACHE_HOME/slipstream.

Without that variable it is ~/.cache/slipstream. Knows no file.
"""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the folder called `name` in the cache; it may not be there yet.

    Raises:
        OSError: this user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # By the XDG convention, a path that is not absolute is ignored.
        base = Path(named) if os.path.isabs(named) else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return base / "slipstream" / name
