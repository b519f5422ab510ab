"""Random models of the tests: found once, and made once in a run.

A recipe draws models until one says enough different tokens. `draws.json` keeps which draw that
was, so that nobody looks for it again; `tests/test_draws.py` holds it to the search. A model that
is wanted several times in a run is made once and copied.
"""

import atexit
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

STORE = Path(__file__).with_suffix(".json")


@cache
def stored() -> dict[str, int]:
    """The number of the first good draw, by the name of a recipe."""
    found: dict[str, int] = json.loads(STORE.read_text())
    return found


def first_good(draw: Callable[[int], bool], num_draws: int) -> int | None:
    """Return the number of the first draw that is good; None if there is none."""
    return next((number for number in range(num_draws) if draw(number)), None)


@cache
def _folder() -> Path:
    folder = TemporaryDirectory(prefix="models-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


_made: dict[tuple[object, ...], Path] = {}


def made_once(key: tuple[object, ...], make: Callable[[Path], None], folder: Path) -> Path:
    """Return `folder`, with the model that `make` saves: made for the first caller of this key."""
    if key not in _made:
        kept = _folder() / str(len(_made))
        make(kept)
        _made[key] = kept
    shutil.copytree(_made[key], folder, dirs_exist_ok=True)
    return folder
