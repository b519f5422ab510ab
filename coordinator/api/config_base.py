"""The base class of all settings: immutable, with one-line error messages for wrong values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from coordinator.api.refusals import check_texts, plain, refusal
from proto.errors import ConfigurationError, did_you_mean, shown

T = TypeVar("T", bound=BaseModel)

AS_FLAGS = "as flags"  # validation context: name settings as the command line does
# True where messages are read by who has typed flags. Each request of a server is read by programs.
_flags_are_read: ContextVar[bool] = ContextVar("flags_are_read", default=False)


class Frozen(BaseModel):
    """Base of the settings classes; a wrong value raises a one-line ConfigurationError.

    The error names the setting. A value must have the type of its setting and is never converted
    by a guess; only lists (as tuples) and numbers of numpy are accepted (`refusals.py`). Changing a
    setting raises ConfigurationError, too (`SamplingParams` alone can be changed).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    # True: a string may be any text. False: it names a model, file or host (no control characters).
    HAS_TEXTS: ClassVar[bool] = False

    @field_validator("*", mode="before")
    @classmethod
    def _as_plain(cls, value: Any) -> object:
        return plain(value)

    @field_validator("*", mode="after")
    @classmethod
    def _is_written_well(cls, value: Any) -> Any:
        check_texts(value, are_names=not cls.HAS_TEXTS)
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _explain(
        cls, values: object, make: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        try:
            return make(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "the settings"
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                line = f"{cls.__name__} has no setting {shown(name)}; there are {known}"
                line += did_you_mean(name, cls.model_fields)
            else:
                line = refusal(named(name, info), error.errors(), values)
            raise ConfigurationError(line) from error

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self).__name__
        raise ConfigurationError(f"{name}: a {kind} does not change; make another {kind}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


def named(name: str, info: ValidationInfo) -> str:
    """Return a setting's name as the caller wrote it: a flag, a name of the API, or the field."""
    if isinstance(info.context, Mapping):
        return str(info.context.get(name, name))
    return "--" + name.replace("_", "-") if info.context == AS_FLAGS else name


def called(name: str, *, is_off: bool = False) -> str:
    """Return a setting's name for a message: a flag on the command line, else the field's name.

    is_off  it is a switch, and it was turned off
    """
    if not _flags_are_read.get():
        return name
    return f"--{'no-' if is_off else ''}{name.replace('_', '-')}"


@contextmanager
def naming_flags(*, are_read: bool = True) -> Iterator[None]:
    """While inside, messages name settings as flags (`called`); or, with False, as fields."""
    token = _flags_are_read.set(are_read)
    try:
        yield
    finally:
        _flags_are_read.reset(token)


def checked(kind: type[T], **values: object) -> T:
    """Return a config made from flags' values. Raises ConfigurationError, which names the flag."""
    return kind.model_validate(values, context=AS_FLAGS)


def named_as(kind: type[T], names: Mapping[str, str], **values: object) -> T:
    """Return a config. Raises ConfigurationError, which calls the settings by `names`."""
    return kind.model_validate(values, context=names)


def reviewed(kind: type[T], value: object, name: str) -> T:
    """Return a config that the caller passed as `name`, checked again. Raises ConfigurationError.

    A frozen config can still have been changed: `model_copy(update=...)` checks nothing, and a dict
    in it can be modified.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name}: expected {kind.__name__}, got {shown(value)}")
    made = type(value).model_validate(dict(value))
    for private, given in (value.__pydantic_private__ or {}).items():
        BaseModel.__setattr__(made, private, given)
    return made
