"""How the help shows a setting: in which panel, what stands for its value, its default (pure)."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from coordinator.api.models.settings import MODELS, ModelsConfig

# Panels, from top to bottom; what is in none of them is in the first, with --help.
MODEL_PANEL, SAMPLING_PANEL, SPECULATION_PANEL = "Models", "Sampling", "Speculation"
DEVICE_PANEL, OUTPUT_PANEL = "Devices", "Output"
HOST_PANEL, REHEARSAL_PANEL, RARE_PANEL = (
    "Other hosts",
    "Rehearsal of other hardware",
    "Rarely needed",
)
PANELS = (
    *("", MODEL_PANEL, SAMPLING_PANEL, SPECULATION_PANEL, DEVICE_PANEL, OUTPUT_PANEL),
    *(HOST_PANEL, REHEARSAL_PANEL, RARE_PANEL),
)
# By the config that a setting is of, and its name where that says more.
OF_CONFIG = {
    "PairConfig": DEVICE_PANEL,
    "SpeculationConfig": SPECULATION_PANEL,
    "SamplingParams": SAMPLING_PANEL,
    "LaunchConfig": HOST_PANEL,
}
OF_NAME = {
    **dict.fromkeys(ModelsConfig.model_fields, MODEL_PANEL),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), OUTPUT_PANEL),
    **dict.fromkeys(("start_timeout_s", "busy_poll_us", "drafter_restarts"), RARE_PANEL),
    "max_draft_candidates": RARE_PANEL,
}
REHEARSAL_PREFIXES = ("simulate_", "link")

METAVARS = {
    **dict.fromkeys(("target", "drafter", "heads"), "MODEL"),
    **dict.fromkeys(("target_revision", "drafter_revision", "heads_revision"), "REVISION"),
    **dict.fromkeys(("target_device", "drafter_device"), "DEVICE"),
    **dict.fromkeys(("stop", "bad_words"), "TEXT"),
    "seed": "SEED",
}
UNITS = {"s": "SECONDS", "ms": "MS", "row": "MS", "us": "US"}  # by the last word of a name
LONGEST_CHOICES = 20  # characters


def panel_of(config: str, name: str) -> str:
    """The panel of a field of a config, by their names."""
    if name.startswith(REHEARSAL_PREFIXES):
        return REHEARSAL_PANEL
    return OF_NAME.get(name) or OF_CONFIG.get(config, "")


def place_of(panel: str) -> int:
    """Where a panel stands; those that are not known, at the end."""
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def metavar_of(name: str, annotation: Any) -> str | None:
    """What stands for a value of this type; None: a flag has none."""
    if name in METAVARS:
        return METAVARS[name]
    kind = _kind_of(annotation)
    if kind is bool:
        return None
    if (unit := UNITS.get(name.rpartition("_")[2])) is not None:
        return unit
    if get_origin(kind) is Literal:
        choices = "|".join(choice for choice in get_args(kind) if choice)
        return choices if len(choices) <= LONGEST_CHOICES else "NAME"
    names: dict[Any, str] = {int: "N", float: "NUMBER", Path: "FILE"}
    return names.get(kind, "TEXT")


def _kind_of(annotation: Any) -> Any:
    """The type without what is said about it, and without None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind_of(arguments[0])
    if origin in (Union, UnionType):
        return next(_kind_of(one) for one in arguments if one is not NoneType)
    return annotation if origin in (None, Literal) else origin


def default_of(default: object) -> bool | str:
    """How a default is shown: not at all, in its own words, or as typer shows it."""
    if default in (None, "") or default is False:
        return False
    if isinstance(default, str) and Path(default).is_relative_to(MODELS):
        return Path(default).relative_to(MODELS.parent).as_posix()
    return True
