"""An experiment file: what it may say, and the arms that it stands for.

Theory of operation
-------------------
A file has a title, what is measured on (`[fixed]`, for all arms) and tables `[[arms]]`. A setting
is one of the Python API (`PairConfig`, `SpeculationConfig`, `SamplingParams`, `LaunchConfig`) or of
`Work` below, written as a flag of the command line would be. Where a table gives a list, it stands
for an arm per value, and with several lists for an arm per combination. `sweep` names settings of
which only the fastest value is measured in the end. What is `optional`, as every peer is, is left
out where it does not run.

Every arm is compared with the arm that has the settings (or the name) of `baseline`: if there are
several, with the one that agrees with it in whatever these differ in.
"""

import dataclasses
import itertools
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import Frozen
from coordinator.api.launch import LaunchConfig
from coordinator.api.params import SamplingParams
from coordinator.cli.flags import FORMS
from proto.errors import ConfigurationError, SlipstreamError, did_you_mean, shown
from proto.installation import MODELS
from proto.messages import Role
from proto.system import cannot_read

MAX_ARMS = 400
NAME, SWEEP, OPTIONAL, DEVICES = "name", "sweep", "optional", "devices"
OF_A_TABLE = (NAME, SWEEP, OPTIONAL, DEVICES)  # and no settings
TESTBED = "testbed:"  # of a model: made on the spot, in the shape of the one that is named
# How a setting is called in the name of an arm; the value alone of those without a name.
SHORT = {
    "policy": "",
    "drafter": "",
    "link": "",
    "verify": "",
    "mode": "",
    "prompts": "",
    "num_speculative_tokens": "K",
    "temperature": "T",
    "texts_at_once": "texts",
    "peer_k": "K",
    "simulate_target_ms": "target",
    "simulate_draft_ms": "draft",
    "policy_option": "",
}

Peer = Literal["", "huggingface", "llamacpp", "one_process", "vllm"]
# What changes logits by the text so far.
PROCESSORS = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "bad_words", "min_tokens"),
)
OUR_ENGINE: frozenset[Peer] = frozenset({"one_process"})  # peers that run on it


class Work(Frozen):
    """What is generated, and by whom."""

    prompts: Annotated[str, Field(min_length=1, description="File of prompts.")] = str(
        Path(__file__).with_name("prompts.jsonl")
    )
    limit: Annotated[
        int | None, Field(ge=1, description="How many of them, from all over the file.")
    ] = None
    max_prompt_tokens: Annotated[
        int, Field(ge=1, description="Of each turn of a prompt, so many of its first tokens.")
    ] = 256
    chat: Annotated[bool, Field(description="Prompts go through the chat template.")] = False
    texts_at_once: Annotated[int, Field(ge=1, le=64, description="Written in shared passes.")] = 1
    peer: Annotated[Peer, Field(description="Another engine, in the place of a pair.")] = ""
    mode: Annotated[
        Literal["plain", "assisted", "lookup"], Field(description="What the peer does.")
    ] = "plain"
    peer_k: Annotated[
        int | None, Field(ge=1, description="Drafts of a pass of the peer; default: its own.")
    ] = None


class Description(Frozen):
    """An experiment file, as it is written."""

    HAS_TEXTS: ClassVar[bool] = True

    title: Annotated[str, Field(min_length=1)]
    question: str = ""
    x: str = ""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 3
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    warm_pairs: Annotated[int, Field(ge=1, le=32)] = 6
    warm_prompts: Annotated[int, Field(ge=1)] = 1
    sweep_prompts: Annotated[int, Field(ge=1)] = 5
    baseline: dict[str, Any] = Field(default_factory=lambda: {"policy": "ar"})
    fixed: dict[str, Any] = Field(default_factory=dict)
    arms: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]


KINDS: tuple[type[BaseModel], ...] = (
    PairConfig,
    SpeculationConfig,
    SamplingParams,
    LaunchConfig,
    Work,
)
NOT_FOR_ALL = {"seed", "n", "speculate", "logprobs", "prompt_logprobs", "nodes", "listen", "keys"}
HOME = {name: kind for kind in KINDS for name in kind.model_fields if name not in NOT_FOR_ALL}
# What must be the same for the tokens to be the same, whoever drafts.
DECIDES_THE_TEXT = (
    *("target", "target_revision", "dtype", "reproducible", "prompts", "limit", "chat"),
    *("max_prompt_tokens", "max_tokens", "texts_at_once"),
    *(name for name in SamplingParams.model_fields if name not in NOT_FOR_ALL),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate, all settings checked.

    table     what its table is called, or else its policy or peer
    settings  those that the file gives it, by name
    group     the table and the values that it shares with others of which the fastest is taken
    baseline  the name of the arm that it is compared with; empty: none
    devices   that it uses, as the file says; None: it does not
    is_optional  it is left out where its processes do not start; so is every peer
    """

    name: str
    table: str
    settings: Mapping[str, Any]
    pair: PairConfig
    speculation: SpeculationConfig
    sampling: SamplingParams
    launch: LaunchConfig
    work: Work
    devices: int | None = None
    is_optional: bool = False
    group: str = ""
    baseline: str = ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A file and its arms, in its order."""

    description: Description
    arms: tuple[Arm, ...]


def num_devices(arm: Arm) -> int:
    """That an arm uses: one for each rank of each model, if nobody says."""
    has_two = arm.speculation.drafts and arm.pair.has_draft_model and not arm.work.peer
    ranks = arm.pair.ranks
    return arm.devices or ranks[Role.TARGET] + (ranks[Role.DRAFTER] if has_two else 0)


def is_same_text(arm: Arm, other: Arm) -> bool:
    """Whether both are asked for the same tokens, and promise them in full precision."""

    def asked(one: Arm) -> list[object]:
        values = {**dict(one.pair), **dict(one.sampling), **dict(one.work)}
        return [values[name] for name in DECIDES_THE_TEXT]

    def has_one_text(one: Arm) -> bool:
        chooses_as_we_do = not one.work.peer or one.work.peer in OUR_ENGINE
        is_seeded = one.speculation.verify == "coupled" and chooses_as_we_do
        return one.sampling.temperature == 0 or is_seeded

    return has_one_text(arm) and has_one_text(other) and asked(arm) == asked(other)


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Read a file; `overrides` go before what it says of all arms. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {cannot_read(error)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from error
    try:
        return experiment(tables, path.parent, overrides or {})
    except SlipstreamError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def experiment(tables: Mapping[str, Any], folder: Path, overrides: Mapping[str, Any]) -> Experiment:
    """The experiment of the tables of a file in this folder. Raises ConfigurationError."""
    own = {name: value for name, value in overrides.items() if name in Description.model_fields}
    rest = {name: value for name, value in overrides.items() if name not in own}
    description = Description.model_validate({**tables, **own})
    _check_known({*description.fixed, *description.baseline, *rest} - {NAME})
    tables_of_arms = [
        one for table in description.arms for one in _settings_of(table, description.fixed, rest)
    ]
    if len(tables_of_arms) > MAX_ARMS:
        raise ConfigurationError(f"{len(tables_of_arms)} arms; {MAX_ARMS} are the most")
    differ = _differing([one.settings for one in tables_of_arms])
    arms = [_arm(one, one.called(differ), one.group(differ), folder) for one in tables_of_arms]
    names = [arm.name for arm in arms]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"two arms are called {shown(twice)}; give one of them a `name`")
    return Experiment(description, tuple(_with_baselines(arms, description.baseline)))


def expand(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One table per combination of the values in its lists, the last list varying first."""
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*choices)]


@dataclass(frozen=True, slots=True)
class _Settings:
    """An arm as it is written.

    name    as its table says
    listed  of what the table has lists
    swept   of them, what only the fastest is taken of
    devices as the table says; None: it does not
    """

    settings: dict[str, Any]
    name: str | None
    listed: tuple[str, ...]
    swept: tuple[str, ...]
    is_optional: bool
    devices: int | None

    @property
    def table(self) -> str:
        """What the table is called, or else its policy or peer."""
        return self.name or str(self.settings.get("peer") or self.settings.get("policy", "auto"))

    def called(self, differing: Collection[str], but: Collection[str] = ()) -> str:
        """By its policy and what differs between arms; or by its name and what its table lists."""
        shown_ones = list(self.listed)
        if self.name is None:
            shown_ones = [key for key in self.settings if key in differing]
            shown_ones = [key for key in shown_ones if key not in ("policy", "peer")]
        parts = [self.table]
        parts += [_short(key, self.settings[key]) for key in shown_ones if key not in but]
        return " ".join(part for part in parts if part)

    def group(self, differing: Collection[str]) -> str:
        """What it shares with those of which the fastest is taken; empty: nothing is swept."""
        return self.called(differing, self.swept) if self.swept else ""


def _settings_of(
    table: Mapping[str, Any], fixed: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[_Settings]:
    """The arms of a table. Raises ConfigurationError."""
    given = {name: value for name, value in table.items() if name not in OF_A_TABLE}
    # What is fixed and what the command line says may be lists too: dimensions of every table.
    settings = {**fixed, **given, **overrides}
    _check_known(settings)
    swept = table.get(SWEEP, [])
    swept = [swept] if isinstance(swept, str) else swept
    if not isinstance(swept, list) or any(not isinstance(one, str) for one in swept):
        raise ConfigurationError(
            f"`{SWEEP}` of an arm is the name of a setting, or a list of them, not {shown(swept)}"
        )
    if unlisted := [one for one in swept if not isinstance(settings.get(one), list)]:
        raise ConfigurationError(
            f"`{SWEEP}` names settings of which the table has lists, and {shown(unlisted[0])} is "
            f"none{did_you_mean(unlisted[0], settings)}"
        )
    name = table.get(NAME)
    if name is not None and not (isinstance(name, str) and name.isprintable()):
        raise ConfigurationError(f"`{NAME}` of an arm is a text of one line, not {shown(name)}")
    if empty := next((key for key, value in settings.items() if value == []), None):
        raise ConfigurationError(f"`{empty}` of an arm is an empty list, which stands for no arm")
    listed = tuple(key for key, value in settings.items() if isinstance(value, list))
    is_optional = table.get(OPTIONAL, False)
    if not isinstance(is_optional, bool):
        raise ConfigurationError(
            f"`{OPTIONAL}` of an arm is true or false, not {shown(is_optional)}"
        )
    devices = table.get(DEVICES)
    if devices is not None and (type(devices) is not int or devices < 1):
        raise ConfigurationError(f"`{DEVICES}` of an arm is a number from 1, not {shown(devices)}")
    return [
        _Settings(one, name, listed, tuple(swept), is_optional, devices) for one in expand(settings)
    ]


def _differing(tables: Sequence[Mapping[str, Any]]) -> set[str]:
    """The settings that are not the same for all arms."""
    names = {name for table in tables for name in table}
    return {name for name in names if len({repr(table.get(name)) for table in tables}) > 1}


def _short(key: str, value: object) -> str:
    """A setting in the name of an arm."""
    if value is True:
        return key.replace("_", " ")
    if value == "":
        return ""
    written = Path(str(value)).stem if key == "prompts" else str(value).removeprefix("drafter:")
    short = SHORT.get(key, key)
    return f"{short}={written}" if short else written


def _arm(written: _Settings, name: str, group: str, folder: Path) -> Arm:
    """Raises ConfigurationError, which names the arm."""
    settings = written.settings
    try:
        parsed = {key: _parsed(key, value, folder) for key, value in settings.items()}
        arm = Arm(
            name,
            written.table,
            settings,
            PairConfig.model_validate(_of(PairConfig, parsed)),
            SpeculationConfig.model_validate(_of(SpeculationConfig, parsed)),
            SamplingParams.model_validate({"ignore_eos": True, **_of(SamplingParams, parsed)}),
            LaunchConfig.model_validate(_of(LaunchConfig, parsed)),
            Work.model_validate(_of(Work, parsed)),
            devices=written.devices,
            is_optional=written.is_optional or bool(settings.get("peer")),
            group=group,
        )
        _check(arm)
    except ConfigurationError as error:
        raise ConfigurationError(f"arm {shown(name)}: {error}") from error
    if "max_num_seqs" not in settings:
        room = {"max_num_seqs": arm.work.texts_at_once}
        arm = dataclasses.replace(arm, pair=arm.pair.model_copy(update=room))
    if "drafter_restarts" not in settings:  # a text without its drafter is no measurement
        arm = dataclasses.replace(arm, pair=arm.pair.model_copy(update={"drafter_restarts": 0}))
    return arm


def _of(kind: type[BaseModel], settings: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if HOME[name] is kind}


def _check(arm: Arm) -> None:
    arm.speculation.check(arm.pair)
    if not arm.work.peer:
        return
    can_simulate = arm.work.peer in OUR_ENGINE and not arm.pair.link
    if arm.launch.ray or (arm.pair.simulated is not None and not can_simulate):
        raise ConfigurationError("a peer runs on this machine as it is: nothing can be simulated")
    if arm.work.peer in OUR_ENGINE:
        _check_one_process(arm)
    if arm.work.texts_at_once > 1:
        raise ConfigurationError("a peer writes one text at once")


def _check_one_process(arm: Arm) -> None:
    """Raises ConfigurationError for what `sync` in one process does not do."""
    if arm.work.mode == "lookup":
        raise ConfigurationError("one_process drafts with a model: its mode is plain or assisted")
    if not arm.pair.has_draft_model or arm.pair.drafter_is_head:
        raise ConfigurationError("one_process drafts with a model, and not with a head or ngram")
    plain = SamplingParams()
    asked = [name for name in PROCESSORS if getattr(arm.sampling, name) != getattr(plain, name)]
    if asked:
        raise ConfigurationError(f"one_process has no {asked[0]}")


def _parsed(name: str, value: object, folder: Path) -> object:
    """As the Python API takes it."""
    kind = HOME[name].model_fields[name].annotation
    if not isinstance(value, str):
        return value
    if name == "link":
        return tuple(value.split())
    form = FORMS.get(name)
    if form is not None and form.parse is not None:
        return form.parse(name, value)
    if name in ("target", "drafter", "heads"):
        return str(MODELS / value) if (MODELS / value).is_dir() else value
    if name in ("prompts", "reference") and value and not Path(value).exists():
        return str(folder / value)
    return (value,) if kind is not None and "tuple" in str(kind) else value


def _check_known(settings: Iterable[str]) -> None:
    for name in settings:
        if name not in HOME:
            hint = did_you_mean(name, HOME) or "; see docs/experiments.md"
            raise ConfigurationError(f"there is no setting {shown(name)}{hint}")


def _has(arm: Arm, name: str, value: object) -> bool:
    return (arm.table if name == NAME else arm.settings.get(name)) == value


def _with_baselines(arms: Sequence[Arm], wanted: Mapping[str, Any]) -> list[Arm]:
    """Each arm with the name of its baseline. Raises ConfigurationError: no arm is one."""
    bases = [
        arm
        for arm in arms
        if all(_has(arm, name, value) for name, value in wanted.items())
        and (arm.work.peer == "" or "peer" in wanted)
    ]
    if not bases and wanted:
        raise ConfigurationError(f"no arm has the settings of `baseline`, {shown(wanted)}")
    differ = sorted(_differing([base.settings for base in bases]))
    by_values = {tuple(repr(base.settings.get(name)) for name in differ): base for base in bases}
    found = []
    for arm in arms:
        base = by_values.get(tuple(repr(arm.settings.get(name)) for name in differ))
        is_one = any(arm is one for one in bases)
        found.append(
            arm if is_one or base is None else dataclasses.replace(arm, baseline=base.name)
        )
    return found
