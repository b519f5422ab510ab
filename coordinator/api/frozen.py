"""Settings that do not change, and say in one line what is wrong with them."""

import re
from typing import Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from proto.errors import ConfigurationError, did_you_mean, shown

T = TypeVar("T", bound=BaseModel)

AS_FLAGS = "as flags"  # validation context: name settings as the command line does


class Frozen(BaseModel):
    """Whatever does not fit is a ConfigurationError of one line that names the setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
                line = f"{cls.__name__} has no setting {name!r}; there are {known}"
                line += did_you_mean(name, cls.model_fields)
            else:
                line = f"{named(name, info)}: {first['msg']} (got {shown(first['input'])})"
                line += _meant(first)
            raise ConfigurationError(line) from error

    def __setattr__(self, name: str, value: object) -> None:
        kind = type(self).__name__
        raise ConfigurationError(f"{name}: a {kind} does not change; make another {kind}")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)


def _meant(error: ErrorDetails) -> str:
    """Which of the words that are allowed was probably meant."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    words = re.findall(r"'([^']+)'", error["ctx"]["expected"])
    return did_you_mean(error["input"], words)


def named(name: str, info: ValidationInfo) -> str:
    """A setting as whoever made it calls it."""
    return "--" + name.replace("_", "-") if info.context == AS_FLAGS else name


def checked(kind: type[T], **values: object) -> T:
    """Make a config of command line options; raises ConfigurationError, which names the flag."""
    return kind.model_validate(values, context=AS_FLAGS)


def reviewed(kind: type[T], value: object, name: str) -> T:
    """The config that was handed over as `name`, checked again. Raises ConfigurationError.

    What is frozen changes all the same: `model_copy(update=...)` checks nothing, and a dict in it
    is a dict.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name}: expected {kind.__name__}, got {shown(value)}")
    return type(value).model_validate(dict(value))
