"""Finds what drafts for a target if that is left to us: `--drafter auto`, or no drafter is named.

The first that there is, and that fits the target:

    what drafts for a model of ours (`named.py`), also for a copy of the toy that has its tokenizer
    the layer for multi-token prediction in the target's checkpoint
    a head in a folder dflash, eagle3, eagle or medusa inside the target's folder, or beside it in a
        folder of the target's name and -dflash, -eagle3, -eagle or -medusa
    n-grams, which need no model

Only files are looked at: of a model on the hub the small ones, which are fetched for this.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from coordinator.api.models import folders
from coordinator.api.models.heads import check_head, check_mtp, find_config, kind_of
from coordinator.api.models.named import NGRAM, TOY, drafter_of
from coordinator.api.models.tokenizers import has_our_tokenizer
from proto.errors import ConfigurationError, ModelError
from proto.head_kinds import MTP, MTP_FAMILIES, HeadKind
from proto.system import is_folder, path_of

# The best first.
_KINDS = (HeadKind.DFLASH, HeadKind.EAGLE3, HeadKind.EAGLE, HeadKind.MEDUSA)


def found(named: str, target: str, revision: str | None) -> str:
    """Return what comes with a target that is none of ours; n-grams if nothing does.

    named   the target as it was named
    target  its folder, or its name on the hub

    Also if the target cannot be read: what is wrong with it is said where it is checked.
    """
    with suppress(ModelError, ConfigurationError, OSError):
        if find_config(target, revision) is not None:
            return _brought_by(folders.find(target, revision), path_of(named).absolute())
    return NGRAM


def _brought_by(target: folders.Checkpoint, place: Path) -> str:
    if has_our_tokenizer(target.folder):
        return drafter_of(TOY, target.name)
    if _has_mtp(target):
        return MTP
    heads = () if target.is_on_hub else _near(place)
    return next((str(folder) for folder in heads if _fits(folder, target)), NGRAM)


def _has_mtp(target: folders.Checkpoint) -> bool:
    """True if the target's checkpoint has a layer for drafting of a family that was tried."""
    if target.text_config.get("model_type") not in MTP_FAMILIES:
        return False
    try:
        check_mtp(target)
    except ModelError:
        return False
    return True


def _near(target: Path) -> Iterator[Path]:
    """Yield the folders in which a head may lie of a target in this folder or file, nearest first.

    No folder is above the root, so there is nothing beside it.
    """
    yield from (target / kind.value for kind in _KINDS)
    name = target.stem if target.suffix == ".gguf" else target.name
    if name:
        yield from (target.with_name(f"{name}-{kind.value}") for kind in _KINDS)


def _fits(folder: Path, target: folders.Checkpoint) -> bool:
    """True if a whole head of this target lies in a folder, as far as files tell."""
    name = str(folder)
    if not is_folder(name):
        return False
    try:
        kind = kind_of(name, None)
        head = folders.find(name, None, is_head=True)
        check_head(head, kind, target)
        head.check_weights()
    except (ModelError, ConfigurationError, OSError, TypeError, ValueError):
        return False  # whatever stands in a file that nobody has named
    return kind is not None
