"""Turns conversations into prompts with the target's own chat template, as transformers does.

Templates come with models and are not trusted: they run in jinja2's sandbox, where they cannot
reach files or modules.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.api.prompts import find_file
from proto.errors import ConfigurationError, ModelError, shown
from proto.system import cannot_read

_GENERATION = re.compile(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})")
_END = re.compile(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})")

Messages = Sequence[Mapping[str, Any]]
Arguments = Mapping[str, Any]
NO_ARGUMENTS: Arguments = MappingProxyType({})

_PROBE = "the content of a message"
# The exceptions that a template may raise on a conversation that it was not made for.
REFUSALS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

# The template for a target that has none of its own.
PLAIN = (
    "{% if tools %}{{ 'Tools: ' }}{{ tools | tojson }}{{ '\n\n' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{{ message['content'] if message['content'] is not none else "
    "message['tool_calls'] | map(attribute='function') | list | tojson }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class ChatTemplate:
    """A target's chat template: renders a conversation as one prompt.

    is_plain  the target has no template of its own, so that PLAIN is used
    source    the template's own text

    The constructor raises ModelError if the source is no template.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], where: str) -> None:
        self.is_plain = source is None
        self.source = PLAIN if source is None else source
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._takes_parts: bool | None = None  # None: not known yet
        try:
            self._template = _compiled(self.source)
        # The other errors come from deep nesting and from constants that the compiler computes.
        except (TemplateError, RecursionError, MemoryError, ValueError, ArithmeticError) as error:
            raise ModelError(f"the chat template of {where} is no template: {error}") from error

    @classmethod
    def of_model(cls, model: str, revision: str | None) -> "ChatTemplate":
        """Read and return a model's chat template, from a folder or the hub. Raises ModelError."""
        config = _read_json(find_file(model, revision, "tokenizer_config.json"))
        path = find_file(model, revision, "chat_template.jinja")
        source = _in_config(config) if path is None else _read_text(path)
        if source is None:  # models of several modalities may have it here, as an object's field
            source = _in_config(_read_json(find_file(model, revision, "chat_template.json")))
        return cls(source, _special_tokens(config), model)

    def render(
        self,
        messages: Messages,
        arguments: Arguments = NO_ARGUMENTS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt that the template makes of a conversation. Raises ConfigurationError.

        arguments  variables of the template, such as enable_thinking; unknown ones are ignored
        add_generation_prompt  end the prompt where the answer begins
        """
        _check(messages, is_plain=self.is_plain)
        given = {"tools": None, "documents": None, **self._special_tokens, **arguments}
        in_parts = any(isinstance(one["content"], str) for one in messages) and self._reads_parts()
        given |= {"messages": [_in_parts(one) if in_parts else dict(one) for one in messages]}
        try:
            return self._template.render(given, add_generation_prompt=add_generation_prompt)
        except REFUSALS as error:
            line = " ".join(str(error).split())
            raise ConfigurationError(
                f"the chat template of {self._where} refuses this conversation: {line}"
            ) from error

    def _reads_parts(self) -> bool:
        """True if it leaves out a content that is a string, and shows one that is a list of parts.

        Some templates of models of several modalities do.
        """

        def is_shown(content: object) -> bool:
            messages = [{"role": "user", "content": content}]
            given = {"tools": None, "messages": messages, **self._special_tokens}
            try:
                return _PROBE in self._template.render(given, add_generation_prompt=False)
            except REFUSALS:
                return False

        if self._takes_parts is None:
            part = {"type": "text", "text": _PROBE}
            self._takes_parts = not is_shown(_PROBE) and is_shown([part])
        return self._takes_parts


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content, if it is a string, is a list of one part."""
    content = message["content"]
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}


def _check(messages: Messages, *, is_plain: bool) -> None:
    """Raise ConfigurationError for a malformed conversation; PLAIN needs string contents."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConfigurationError(f"a conversation is a list of messages, not {shown(messages)}")
    if not messages:
        raise ConfigurationError("the conversation is empty: give at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ConfigurationError(
                f'a message has a "role" and a "content"; this one is {shown(message)}'
            )
        role, content = message["role"], message["content"]
        if not isinstance(role, str):
            raise ConfigurationError(f'the "role" of a message is a string, not {shown(role)}')
        has_calls = content is None and isinstance(message.get("tool_calls"), Sequence)
        is_other = has_calls if is_plain else _is_structured(content)
        if not isinstance(content, str) and not is_other:
            raise ConfigurationError(f'the "content" of a message is a text, not {shown(content)}')


def _is_structured(content: object) -> bool:
    """True for a message content that is no string: None (with tool calls) or a list of parts."""
    if isinstance(content, Sequence):
        return all(isinstance(part, Mapping) for part in content)
    return content is None


def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # jinja2's own `tojson` escapes HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # `generation` marks the assistant's part for training and leaves the text as it is.
    return environment.from_string(_GENERATION.sub(r"\1if true\2", _END.sub(r"\1endif\2", source)))


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


def _read_json(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    text = _read_text(path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"cannot read {path}: it holds no JSON object")
    return config


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises ModelError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {cannot_read(error)}") from error
    except ValueError as error:
        raise ModelError(f"cannot read {path}: {error}; get it again") from error


def _in_config(config: dict[str, Any]) -> str | None:
    """Return the template in a tokenizer_config.json (the "default" of several), or None."""
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = [item for item in entry if isinstance(item, dict)]
        defaults = [item.get("template") for item in named if item.get("name") == "default"]
        entry = defaults[-1] if defaults else None
    return entry if isinstance(entry, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token` and the like; in the file each is a string or has a `content`."""
    found = {}
    for name, entry in config.items():
        content = entry.get("content") if isinstance(entry, dict) else entry
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
