"""Reads an experiment file and makes the arms (combinations of settings) that it describes.

Theory of operation
-------------------
A file has a title, settings for all arms (`[fixed]`) and tables `[[arms]]`. A setting
is one of the Python API (`PairConfig`, `SpeculationConfig`, `SamplingParams`, `LaunchConfig`) or of
`Work` below, written as a flag of the command line would be. Where a table gives a list, it stands
for an arm per value, and with several lists for an arm per combination. `sweep` names settings of
which only the fastest value is measured in the end. An `optional` arm, as every arm of a peer is,
is left out where it does not run.

Every arm is compared with the arm that has the settings (or the name) of `baseline`. If several
arms have these settings, it is compared with the one that equals it in all settings in which those
baselines differ.
"""

import dataclasses
import itertools
import re
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
OF_A_TABLE = (NAME, SWEEP, OPTIONAL, DEVICES)  # keys of an `[[arms]]` table that are no settings
TESTBED = "testbed:"  # prefix of a model that is made when needed, in the shape of the named one
# What a setting is called in the name of an arm; "": only its value is written.
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
    "peer_file": "",
    "simulate_target_ms": "target",
    "simulate_draft_ms": "draft",
    "policy_option": "",
}

Peer = Literal["", "huggingface", "llamacpp", "one_process", "vllm"]
# Sampling parameters that change the logits depending on the text so far.
PROCESSORS = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "bad_words", "min_tokens"),
)
STOPS = ("stop", "stop_token_ids", "ignore_eos")  # parameters that decide where a text ends
OF_PEERS = SamplingParams(ignore_eos=True)  # what every peer does, whatever these parameters say
TOP_P_FIRST: frozenset[Peer] = frozenset({"huggingface"})  # before min_p
OF_TEXT: frozenset[Peer] = frozenset({"llamacpp"})  # peers that state a text, and not its tokens
GGUF = ".gguf"
QUANTISED = re.compile(r"[A-Z][A-Z0-9_]*")  # the form of llama.cpp's names of kinds: Q4_K_M
OUR_ENGINE: frozenset[Peer] = frozenset({"one_process"})  # peers that run on our own engine


class Work(Frozen):
    """Settings of an arm that say which texts are generated, and by which engine."""

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
    peer_file: Annotated[
        str,
        Field(
            description="For llamacpp: a GGUF file in the place of the target, or the kind (Q8_0, "
            "Q4_K_M ...) into which llama-quantize converts the target."
        ),
    ] = ""


class Description(Frozen):
    """The content of an experiment file, checked; the arms are not expanded yet.

    title, question  what the experiment is called, and what it is to answer
    x                name of the setting on the x axis of a picture; empty: none
    repetitions      times that every arm answers every prompt
    seed             decides the random order of the cells
    warm_pairs       most engines that are kept running at the same time
    warm_prompts     prompts that a new engine answers before it is measured
    sweep_prompts    prompts on which the values of a swept setting are compared
    without_prompt   the speeds leave out the first tokens, and the time in which the prompt is read
    baseline         settings of the arm that others are compared with
    fixed            settings of all arms
    arms             the `[[arms]]` tables
    """

    HAS_TEXTS: ClassVar[bool] = True

    title: Annotated[str, Field(min_length=1)]
    question: str = ""
    x: str = ""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 3
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    warm_pairs: Annotated[int, Field(ge=1, le=32)] = 6
    warm_prompts: Annotated[int, Field(ge=1)] = 1
    sweep_prompts: Annotated[int, Field(ge=1)] = 5
    without_prompt: bool = False
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
NOT_FOR_ALL = {
    *("seed", "n", "speculate", "logprobs", "prompt_logprobs", "structured_outputs"),
    "output_kind",
    *("nodes", "listen", "keys"),
}
HOME = {name: kind for kind in KINDS for name in kind.model_fields if name not in NOT_FOR_ALL}
# Settings that must be equal for two arms to write the same tokens, whatever the drafter.
DECIDES_THE_TEXT = (
    *(
        "target",
        "target_revision",
        "quantization",
        "dtype",
        "reproducible",
        "prompts",
        "limit",
        "chat",
    ),
    *("max_prompt_tokens", "max_tokens", "texts_at_once", "peer_file"),
    *(name for name in SamplingParams.model_fields if name not in NOT_FOR_ALL),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One combination of settings to measure, all of them checked.

    name          unique in the experiment
    table         the name of its `[[arms]]` table, or else its policy or peer
    settings      what the file gives it, by name of setting
    group         name shared by the arms of one sweep, of which only the fastest is measured;
                  empty: nothing is swept
    baseline      the name of the arm that it is compared with; empty: none
    devices       number of devices that it uses, as the file says; None: the file does not say
    is_optional   leave the arm out where its processes do not start; true for every peer
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
    """An experiment file with all of its arms, in the order of the file."""

    description: Description
    arms: tuple[Arm, ...]


def num_devices(arm: Arm) -> int:
    """Return the number of devices that an arm uses; by default one for each rank of each model."""
    has_two = arm.speculation.drafts and arm.pair.has_draft_process and not arm.work.peer
    ranks = arm.pair.ranks
    return arm.devices or ranks[Role.TARGET] + (ranks[Role.DRAFTER] if has_two else 0)


def is_same_text(arm: Arm, other: Arm) -> bool:
    """True if both arms must write equal tokens (in full precision)."""

    def asked(one: Arm) -> list[object]:
        values = {**dict(one.pair), **dict(one.sampling), **dict(one.work)}
        return [values[name] for name in DECIDES_THE_TEXT]

    def has_one_text(one: Arm) -> bool:
        chooses_as_we_do = not one.work.peer or one.work.peer in OUR_ENGINE
        is_seeded = one.speculation.verify == "coupled" and chooses_as_we_do
        states_tokens = one.work.peer not in OF_TEXT
        return (one.sampling.temperature == 0 and states_tokens) or is_seeded

    return has_one_text(arm) and has_one_text(other) and asked(arm) == asked(other)


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
    """Read and return an experiment file; `overrides` replace settings of all its arms.

    Raises ConfigurationError.
    """
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
    """Return the experiment that the parsed TOML `tables` describe. Raises ConfigurationError.

    folder     the folder of the file: relative paths of prompts are looked for there
    overrides  settings that replace those of the file
    """
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
    """Return one table per combination of the values in its lists; the last list varies fastest."""
    choices = [value if isinstance(value, list) else [value] for value in table.values()]
    return [dict(zip(table, values, strict=True)) for values in itertools.product(*choices)]


@dataclass(frozen=True, slots=True)
class _ArmSettings:
    """The settings of one arm as the file writes them, not yet checked.

    name     as its table says; None: the table has no name
    listed   settings for which the table has a list
    swept    those of them for which only the fastest value is measured
    devices  number of devices, as the table says; None: it does not say
    """

    settings: dict[str, Any]
    name: str | None
    listed: tuple[str, ...]
    swept: tuple[str, ...]
    is_optional: bool
    devices: int | None

    @property
    def table(self) -> str:
        """Return the name of the arm's table, or else its policy or peer."""
        return self.name or str(self.settings.get("peer") or self.settings.get("policy", "auto"))

    def called(self, differing: Collection[str], but: Collection[str] = ()) -> str:
        """Return the arm's name: policy and what differs between arms, or its name and lists.

        differing  settings that are not the same in all arms
        but        settings that are left out of the name
        """
        shown_ones = list(self.listed)
        if self.name is None:
            shown_ones = [key for key in self.settings if key in differing]
            shown_ones = [key for key in shown_ones if key not in ("policy", "peer")]
        parts = [self.table]
        parts += [_short(key, self.settings[key]) for key in shown_ones if key not in but]
        return " ".join(part for part in parts if part)

    def group(self, differing: Collection[str]) -> str:
        """Return the name shared by the arms of a sweep (of which the fastest counts), or ""."""
        return self.called(differing, self.swept) if self.swept else ""


def _settings_of(
    table: Mapping[str, Any], fixed: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[_ArmSettings]:
    """Return one `_ArmSettings` for each combination of a table's values.

    Raises ConfigurationError.
    """
    given = {name: value for name, value in table.items() if name not in OF_A_TABLE}
    # Settings for all arms and overrides may be lists too: then every table is expanded over them.
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
        _ArmSettings(one, name, listed, tuple(swept), is_optional, devices)
        for one in expand(settings)
    ]


def _differing(tables: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of the settings whose value differs between arms."""
    names = {name for table in tables for name in table}
    return {name for name in names if len({repr(table.get(name)) for table in tables}) > 1}


def _short(key: str, value: object) -> str:
    """Return how a setting is written in an arm's name; "": the value is ""."""
    if value is True:
        return key.replace("_", " ")
    if value == "":
        return ""
    is_file = key in ("prompts", "peer_file")
    written = Path(str(value)).stem if is_file else str(value).removeprefix("drafter:")
    short = SHORT.get(key, key)
    return f"{short}={written}" if short else written


def _arm(written: _ArmSettings, name: str, group: str, folder: Path) -> Arm:
    """Check the settings of an arm and return it. Raises ConfigurationError that names the arm."""
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
    # A text that lost a node is measured again, and what was measured earlier decides nothing.
    given = {"target_restarts": 0, "drafter_restarts": 0, "keep_speeds": False}
    update = {name: value for name, value in given.items() if name not in settings}
    return dataclasses.replace(arm, pair=arm.pair.model_copy(update=update))


def _of(kind: type[BaseModel], settings: Mapping[str, object]) -> dict[str, object]:
    """Return those settings that are fields of this kind of configuration."""
    return {name: value for name, value in settings.items() if HOME[name] is kind}


def _check(arm: Arm) -> None:
    """Raise ConfigurationError for a combination of settings that cannot be run."""
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
    _check_file_of_peer(arm.work)
    _check_sampling_of_peer(arm)


def _check_file_of_peer(work: Work) -> None:
    """Raise ConfigurationError if `peer_file` is neither a file nor a kind of quantised weights."""
    file = work.peer_file
    if file and work.peer != "llamacpp":
        raise ConfigurationError(f"{work.peer} reads no GGUF file; leave `peer_file` out")
    if file.endswith(GGUF) and not Path(file).is_file():
        raise ConfigurationError(f"there is no file {shown(file)}; see `peer_file`")
    if file and not file.endswith(GGUF) and not QUANTISED.fullmatch(file):
        raise ConfigurationError(
            f"`peer_file` is a file that ends in {GGUF}, or a kind such as Q8_0, not {shown(file)}"
        )


def _check_one_process(arm: Arm) -> None:
    """Raise ConfigurationError for what the peer `one_process` cannot do."""
    if arm.work.mode == "lookup":
        raise ConfigurationError("one_process drafts with a model: its mode is plain or assisted")
    if not arm.pair.has_draft_process or arm.pair.drafter_is_head:
        raise ConfigurationError("one_process drafts with a model, and not with a head or ngram")


def _check_sampling_of_peer(arm: Arm) -> None:
    """Raise ConfigurationError for sampling parameters that a peer lacks or applies differently.

    With them its texts would come from another distribution than those of a pair.
    """
    peer, asked = arm.work.peer, arm.sampling
    for name in (*PROCESSORS, *STOPS):
        if getattr(asked, name) != getattr(OF_PEERS, name):
            why = "a peer always writes max_tokens tokens" if name in STOPS else "leave it out"
            raise ConfigurationError(f"{peer} has no {name}; {why}")
    if asked.temperature == 0:  # greedy: the likeliest token is never cut off
        return
    has_top_p, has_min_p = asked.top_p < 1, asked.min_p > 0
    if peer in TOP_P_FIRST and has_top_p and has_min_p:
        raise ConfigurationError(
            f"{peer} applies top_p before min_p, a pair after it; set only one"
        )
    if peer == "vllm" and has_min_p and arm.work.mode != "plain":
        raise ConfigurationError(
            "vllm has no min_p when it drafts; leave it out, or set mode to plain"
        )


def _parsed(name: str, value: object, folder: Path) -> object:
    """Return the value of a setting in the form that the Python API takes."""
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
    if name == "peer_file" and value.endswith(GGUF):  # the peer runs in another folder
        return str(Path(value).absolute() if Path(value).exists() else folder.absolute() / value)
    if name in ("prompts", "reference") and value and not Path(value).exists():
        return str(folder / value)
    return (value,) if kind is not None and "tuple" in str(kind) else value


def _check_known(settings: Iterable[str]) -> None:
    """Raise ConfigurationError for the first name that is no setting."""
    for name in settings:
        if name not in HOME:
            hint = did_you_mean(name, HOME) or "; see docs/experiments.md"
            raise ConfigurationError(f"there is no setting {shown(name)}{hint}")


def _has(arm: Arm, name: str, value: object) -> bool:
    """True if the arm has this value of a setting (or of the name of its table)."""
    return (arm.table if name == NAME else arm.settings.get(name)) == value


def _with_baselines(arms: Sequence[Arm], wanted: Mapping[str, Any]) -> list[Arm]:
    """Return the arms, each with the name of its baseline.

    Raises ConfigurationError if no arm has the settings of `baseline`.
    """
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
