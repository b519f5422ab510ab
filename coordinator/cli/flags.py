"""Makes flags from settings: a command's parameter that is a config becomes a flag for each field.

Name, type, default and help of a flag are those of the field (`coordinator.api.config`, `params`),
which also checks the value. This file only defines how a value is written on a command line.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.config_base import checked, naming_flags
from coordinator.cli.help import (
    OUTPUT_PANEL,
    SAMPLING_PANEL,
    SPECULATION_PANEL,
    default_of,
    kind_of,
    metavar_of,
    panel_of,
)
from proto.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from coordinator.api import vllm

# -- flags -----------------------------------------------------------------------------------------

Command = Callable[..., None]  # a function that typer makes a command


def parse_ids(flag: str, text: str) -> tuple[int, ...]:
    """Return the numbers in text like 1,2,3. Raises ConfigurationError, which names the flag."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(
            f"{flag}: expected numbers like 1,2,3, got {shown(text)}"
        ) from error


def parse_biases(flag: str, text: str) -> dict[int, float]:
    """Return the biases in text like 50:-100,7:2.5. Raises ConfigurationError, naming the flag."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        raise ConfigurationError(
            f"{flag}: expected biases like 50:-100,7:2.5, got {shown(text)}"
        ) from error


def parse_options(flag: str, text: str) -> dict[str, float]:
    """Return numbers by name from text like width=4,branches=3. Raises ConfigurationError."""
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {name.strip().replace("-", "_"): float(value) for name, value in pairs}
    except ValueError as error:
        raise ConfigurationError(
            f"{flag}: expected numbers like width=4,branches=3, got {shown(text)}"
        ) from error


@dataclass(frozen=True, slots=True)
class Form:
    """How a value is written as a flag: placeholder, and `parse`, which gets flag and text."""

    metavar: str
    parse: Callable[[str, str], object] | None = None


# In the `json_schema_extra` of a field that says itself what stands for its value.
METAVAR = "metavar"
FORMS = {
    "logit_bias": Form("ID:BIAS,...", parse_biases),
    "policy_option": Form("NAME=VALUE,...", parse_options),
    "stop_token_ids": Form("ID,...", parse_ids),
    "allowed_token_ids": Form("ID,...", parse_ids),
    "reference": Form("FILE"),
    "ray": Form("ADDRESS"),
    "listen": Form("ENDPOINT"),
    "keys": Form("DIR"),
    "journal": Form("DIR"),
    "link": Form("NODE:DELAY,..."),
}
# The settings that simulate other hardware.
SIMULATION = (
    *("simulate_target_ms", "simulate_target_ms_per_row"),
    *("simulate_draft_ms", "simulate_draft_ms_per_row"),
    *("link", "link_seed"),
)


class Flags:
    """Chooses the fields of a config that a command has flags for: `names`, or all `but` some.

    argument  True: the target may also be named without a flag, as the command's argument MODEL
    defaults  defaults of this command that differ from the config's; fixed for fields without flag;
              None: the command chooses, where no value was given
    """

    def __init__(
        self,
        *names: str,
        but: tuple[str, ...] = (),
        argument: bool = False,
        **defaults: object,
    ) -> None:
        self.argument = argument
        self._names = names
        self._but = but
        self._defaults: Mapping[str, object] = defaults

    @property
    def is_whole(self) -> bool:
        """True if there are flags for all fields but those that are named as left out."""
        return not self._names

    def of(self, kind: type[BaseModel]) -> Iterator[inspect.Parameter]:
        """Yield a parameter for each chosen field, in the form that typer reads."""
        for name in self._fields(kind):
            field = kind.model_fields[name]
            default = self._defaults.get(name, field.get_default(call_default_factory=True))
            yield _parameter(kind.__name__, name, field, default)

    def read(self, kind: type[BaseModel], values: dict[str, Any]) -> BaseModel:
        """Return the config that the flags' values make, and remove these from `values`.

        Raises ConfigurationError.
        """
        given = {name: value for name, value in self._defaults.items() if value is not None}
        for name in self._fields(kind):
            value = values.pop(name)
            form = FORMS.get(name)
            if form and form.parse and isinstance(value, str):
                value = form.parse(_flag(name), value)
            if value is not None:
                given[name] = value
        return checked(kind, **given)

    def _fields(self, kind: type[BaseModel]) -> list[str]:
        return [name for name in self._names or kind.model_fields if name not in self._but]


def with_settings(command: Command) -> Command:
    """Return the command with flags in the place of its configs; it is called with the configs.

    A parameter is a config, or `Annotated[config, Flags(...)]`.
    """
    signature = inspect.signature(command, eval_str=True)
    configs: dict[str, tuple[type[BaseModel], Flags]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind, *marks = get_args(parameter.annotation) or (parameter.annotation,)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            flags = next((mark for mark in marks if isinstance(mark, Flags)), Flags())
            configs[parameter.name] = kind, flags
            parameters += flags.of(kind)
        else:
            parameters.append(parameter)
    if any(flags.argument for _, flags in configs.values()):
        parameters.append(_parameter_of("model", ModelArgument))
    if {PairConfig, SpeculationConfig} <= {kind for kind, one in configs.values() if one.is_whole}:
        parameters.append(_parameter_of("speculative_config", SpeculativeJson))
    usual = {parameter.name: parameter.default for parameter in parameters}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        with naming_flags():
            _read_argument(values, usual)
            wanted = _read_speculative(values, usual)
            made = {name: flags.read(kind, values) for name, (kind, flags) in configs.items()}
            if wanted is not None:
                wanted.check_kind(next(one for one in made.values() if isinstance(one, PairConfig)))
            command(**values, **made)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter_of(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _read_argument(values: dict[str, Any], usual: Mapping[str, Any]) -> None:
    """Make the argument MODEL the target. Raises ConfigurationError: --target names another."""
    model = values.pop("model", None)
    if model is None:
        return
    if values["target"] not in (model, usual["target"]):
        raise ConfigurationError(
            f"the target is named twice: {shown(model)} and --target {values['target']}"
        )
    values["target"] = model


def _read_speculative(
    values: dict[str, Any], usual: Mapping[str, Any]
) -> "vllm.Speculation | None":
    """Put what --speculative-config says into the values of our flags.

    Raises ConfigurationError: it cannot be read, or says what a flag says too.
    """
    text = values.pop("speculative_config", None)
    if text is None:
        return None
    from coordinator.api import vllm

    flag = _flag("speculative_config")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = text
    wanted = vllm.read(given, flag)
    settings = wanted.settings
    found: dict[str, Any] = {name: getattr(settings, name) for name in settings.model_fields_set}
    found |= wanted.of_pair
    if wanted.model is not None:
        found["drafter"] = wanted.model
    for name, value in found.items():
        if values[name] != usual[name]:
            raise ConfigurationError(f"{flag} and {_flag(name)} say the same; leave one out")
        values[name] = value
    return wanted


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(config: str, name: str, field: FieldInfo, default: object) -> inspect.Parameter:
    form = FORMS.get(name)
    if isinstance(default, tuple | dict):
        default = None
    flag = _flag(name)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if default is True else flag,
        help=field.description,
        metavar=form.metavar if form else _metavar(name, field),
        show_default=default_of(default),
        rich_help_panel=panel_of(config, name) or None,
    )
    written = _written(field.annotation)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[written | None if default is None else written, option],
    )


def _metavar(name: str, field: FieldInfo) -> str | None:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and METAVAR in extra:
        return str(extra[METAVAR])
    return metavar_of(name, field.annotation)


def _written(annotation: Any) -> Any:
    """Return the type that typer reads from the command line for a field of this type."""
    kind = kind_of(annotation)
    origin = get_origin(kind)
    if origin is Literal or origin is dict:
        return str
    if origin is tuple:
        return list[str] if _written(get_args(kind)[0]) is str else str
    return kind


# -- options ---------------------------------------------------------------------------------------

# The options of the command line that are not made from settings.

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="The model whose text is written. It may also be given as --target.",
    ),
]
SpeculativeJson = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help="Drafter and speculation as vLLM writes them. For example "
        '\'{"model": "SMALL", "num_speculative_tokens": 5}\'.',
        rich_help_panel=SPECULATION_PANEL,
    ),
]

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to continue. - reads it from standard input."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Continue each prompt of this file. It has one prompt per line, or is JSON Lines with "
        '"prompt" or "turns" (.jsonl). Up to --max-num-seqs texts are written at once; they are '
        "shown one after another, in the order of the prompts.",
    ),
]
PromptIds = Annotated[
    str | None, typer.Option(metavar="ID,...", help="Continue these token ids, such as 1,2,3.")
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Answer each prompt, with the target's chat template.")
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write JSON that fits the JSON schema in this file.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Write a text that matches this regular expression.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Write a JSON object per prompt to stdout, and no text.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
ShowSpeculation = Annotated[
    bool,
    typer.Option(
        "--show-speculation",
        help="Show which tokens were drafted. Accepted drafts, rejected drafts and the target's "
        "own tokens have different colours or marks.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Show all figures of the text.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show the memory that the models would take. Nothing is started.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Record what every process does in this file. It is a Chrome trace; `trace-summary` "
        "and ui.perfetto.dev read it.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
