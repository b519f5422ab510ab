"""Compiles chat templates: jinja2 in its sandbox, with the filters and names of transformers.

Templates come with models and are not trusted. They cannot reach files or modules: the sandbox
hides what begins with an underscore, and the objects here have nothing else to be misused.
"""

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_GENERATION = re.compile(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})")
_END = re.compile(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})")


@lru_cache(maxsize=32)
def compiled(source: str) -> Template:
    """Return the template of a source.

    Raises TemplateError for another text; RecursionError, MemoryError, ValueError or
    ArithmeticError for deep nesting, and for constants that the compiler computes.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # jinja2's own `tojson` escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    # `generation` marks the assistant's part for training and leaves the text as it is.
    return environment.from_string(_GENERATION.sub(r"\1if true\2", _END.sub(r"\1endif\2", source)))


class _Dict:
    """Makes dicts, without the attributes of the class `dict` itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """jinja2's namespace, in which no name may begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a name may be `self`
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _refuse_hidden(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"no name in a namespace may begin with an underscore: {name}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
