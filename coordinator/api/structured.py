"""Structured output: what an answer must look like, as a caller says it.

`grammars.py` makes grammars of it, and finds what is wrong in them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from proto.errors import ConfigurationError, did_you_mean, shown

NAME = "structured_outputs"
TOO_COMPLEX = "is too complex; make it simpler"
FOLLOW = "follow"  # in place of a kind: asks the process that checks grammars about a text
KINDS = ("json", "regex", "choice", "grammar", "json_object")
MAX_LEN = 1 << 16  # characters of a schema, pattern or grammar, or of all choices
MAX_CHOICES = 4096
ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like, with vLLM's names. Give exactly one of the first five.

    json         the JSON schema that the answer must fit, as a dict or as text
    regex        the pattern that the whole answer must match
    choice       texts of which the answer must be one
    grammar      rules in the form of Lark or GBNF; the answer is derived from `start` or `root`
    json_object  True: the answer is any JSON object
    disable_any_whitespace  True: no white space between the parts of a JSON text
    called       how messages name it, such as --regex; "": as above

    The constructor raises ConfigurationError.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    called: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_types(self)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            also = f"got {' and '.join(given)}" if given else "got none of them"
            raise ConfigurationError(
                f"{self.title}: expected exactly one of {', '.join(KINDS)}, {also}"
            )
        size = len(self.source)
        if size > MAX_LEN:
            raise ConfigurationError(
                f"{self.name} has {size} characters; make it shorter than {MAX_LEN}"
            )

    @property
    def kind(self) -> str:
        """Return which of the first five is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def title(self) -> str:
        """Return the name for messages about the form as a whole."""
        return self.called or NAME

    @property
    def name(self) -> str:
        """Return the name for messages about the schema, pattern, choice or grammar."""
        return self.called or f"{NAME}: {self.kind}"

    @property
    def source(self) -> str:
        """Return the schema, pattern or grammar as text; the choices as JSON."""
        if self.json is not None:
            return self.json if isinstance(self.json, str) else _dumped(self.json)
        if self.choice is not None:
            return _dumped(list(self.choice))
        return self.regex or self.grammar or ANY_OBJECT

    @classmethod
    def read(cls, given: object, called: str = "") -> "StructuredOutputsParams":
        """Return the parameters in a dict, as a request has them. Raises ConfigurationError.

        Unknown names are refused, but for null and false, which ask for nothing.

        called  as for the class
        """
        if not isinstance(given, Mapping):
            raise ConfigurationError(f"{NAME}: expected a dict (a table), got {shown(given)}")
        names = [one.name for one in fields(cls) if one.name != "called"]
        for name, value in given.items():
            if name not in names and value is not None and value is not False:
                meant = did_you_mean(name, names) if isinstance(name, str) else ""
                raise ConfigurationError(f"{NAME} has no {shown(name)}{meant}")
        known = {name: given[name] for name in names if given.get(name) is not None}
        return cls(**known, called=called)


def _check_types(given: StructuredOutputsParams) -> None:
    """Raise ConfigurationError if a field has a value of another type."""
    expected = {
        "json": (str | Mapping, "a JSON schema (a dict, or its text)"),
        "regex": (str, "a text"),
        "choice": (list | tuple, "a list of texts"),
        "grammar": (str, "a text"),
        "json_object": (bool, "true or false"),
        "disable_any_whitespace": (bool, "true or false"),
    }
    for name, (kind, words) in expected.items():
        value, where = getattr(given, name), given.called or f"{NAME}: {name}"
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{where}: expected {words}, got {shown(value)}")
        if value == "":
            raise ConfigurationError(f"{where} is empty; leave it out")
    choice, where = given.choice, given.called or f"{NAME}: choice"
    if choice is not None:
        if not all(isinstance(text, str) and text for text in choice):
            raise ConfigurationError(f"{where}: expected texts that are not empty")
        if not 0 < len(choice) <= MAX_CHOICES:
            raise ConfigurationError(
                f"{where}: expected 1 to {MAX_CHOICES} texts, got {len(choice)}"
            )


def _dumped(value: object) -> str:
    """Return a value as JSON. Raises ConfigurationError."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise ConfigurationError(f"{NAME}: json is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{NAME}: json is no JSON: {error}") from error
