"""Turns conversations into prompts with the target's own chat template, as transformers does."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from coordinator.api.conversations import (
    Messages,
    check,
    in_parts,
    marked,
    plain,
    prepared,
    until_mark,
)
from coordinator.api.prompts import find_file, find_files
from coordinator.api.special_tokens import read_json, read_special_tokens, read_text
from coordinator.api.template_language import compiled
from proto.errors import ConfigurationError, ModelError, shown

if TYPE_CHECKING:
    from coordinator.api.pair import Pair

Arguments = Mapping[str, Any]
NO_ARGUMENTS: Arguments = MappingProxyType({})

# What makes `compiled` refuse a source.
_NO_TEMPLATE = (TemplateError, RecursionError, MemoryError, ValueError, ArithmeticError)
DEFAULT, TOOL_USE = "default", "tool_use"


@dataclass(frozen=True, slots=True)
class PromptForm:
    """How a conversation becomes a prompt, besides the arguments of the template.

    add_generation_prompt, continue_final_message, template  as for `ChatTemplate.render`
    add_special_tokens  add the tokens that the tokenizer itself puts around a text; None: only if
                        the target has no template of its own, because a template writes them itself
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template: str | None = None
    add_special_tokens: bool | None = None


USUAL = PromptForm()
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
    "{{ message['content'] if message['content'] is defined else "
    "message['tool_calls'] | map(attribute='function') | list | tojson }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class ChatTemplate:
    """A target's chat template, or several by name: renders a conversation as one prompt.

    With tools the one named `tool_use` is taken, if there is one; else the one named `default`.

    source    a template, several by name, or None: PLAIN is used
    made_of   what the constructor was given
    is_plain  the target has no template of its own
    sources   the templates' texts, by name

    The constructor raises ModelError if a source is no template.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str],
        where: str,
    ) -> None:
        self.made_of = (source, special_tokens, where)
        self.is_plain = not source and not isinstance(source, str)
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._takes_parts: dict[str, bool] = {}  # by source
        if isinstance(source, Mapping):
            self.sources = dict(source) or {DEFAULT: PLAIN}
        else:
            self.sources = {DEFAULT: PLAIN if source is None else source}
        try:
            for one in self.sources.values():
                compiled(one)
        except _NO_TEMPLATE as error:
            raise ModelError(f"the chat template of {where} is no template: {error}") from error

    @classmethod
    def of_model(cls, model: str, revision: str | None) -> "ChatTemplate":
        """Read and return a model's chat template, from a folder or the hub. Raises ModelError."""
        config = read_json(find_file(model, revision, "tokenizer_config.json"))
        found = _in_files(model, revision) or _in_config(config)
        if not found:  # models of several modalities may have it here, as an object's field
            found = _in_config(read_json(find_file(model, revision, "chat_template.json")))
        return cls(found, read_special_tokens(model, revision), model)

    def render(
        self,
        messages: Messages,
        arguments: Arguments = NO_ARGUMENTS,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template: str | None = None,
    ) -> str:
        """Return the prompt that the template makes of a conversation. Raises ConfigurationError.

        arguments  variables of the template, such as tools and enable_thinking; unknown ones are
                   ignored
        add_generation_prompt  end the prompt where the answer begins; None: unless the last message
                               is continued
        continue_final_message  end the prompt where the content of the last message ends
        template  a template, or the name of one of the model's; None: as the class says
        """
        if continue_final_message and add_generation_prompt:
            raise ConfigurationError(
                "continue_final_message and add_generation_prompt exclude each other; "
                "set one of them to false"
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        check(messages, is_plain=self.is_plain and template is None)
        _check_lists(arguments)
        source = self._chosen(template, arguments.get("tools"))
        final = ""
        try:
            given = {"tools": None, "documents": None, **self._special_tokens, **plain(arguments)}
            said = prepared(messages)
            if any(isinstance(one.get("content"), str) for one in said) and self._reads_parts(
                source
            ):
                said = [in_parts(one) for one in said]
            if continue_final_message:
                said, final = marked(said)
            given |= {"messages": said, "add_generation_prompt": add_generation_prompt}
            prompt = compiled(source).render(given)
        except REFUSALS as error:
            line = " ".join(str(error).split())
            raise ConfigurationError(
                f"the chat template of {self._where} refuses this conversation: {line}"
            ) from error
        return until_mark(prompt, final) if continue_final_message else prompt

    def _chosen(self, template: str | None, tools: object) -> str:
        """Return the source of the template for a conversation. Raises ConfigurationError."""
        if template is not None:
            return self.sources.get(template) or _checked(template)
        names = [TOOL_USE, DEFAULT] if tools is not None else [DEFAULT]
        for name in names:
            if name in self.sources:
                return self.sources[name]
        raise ConfigurationError(
            f"{self._where} has chat templates for special uses alone "
            f"({', '.join(self.sources)}); give token ids, or name a template in Python"
        )

    def _reads_parts(self, source: str) -> bool:
        """True if it leaves out a content that is a string, and shows one that is a list of parts.

        Some templates of models of several modalities do.
        """

        def is_shown(content: object) -> bool:
            messages = [{"role": "user", "content": content}]
            given = {"tools": None, "messages": messages, **self._special_tokens}
            try:
                return _PROBE in compiled(source).render(given, add_generation_prompt=False)
            except REFUSALS:
                return False

        if source not in self._takes_parts:
            part = {"type": "text", "text": _PROBE}
            self._takes_parts[source] = not is_shown(_PROBE) and is_shown([part])
        return self._takes_parts[source]


def has_chat_template(pair: "Pair") -> bool:
    """True if a pair's target has a chat template of its own that can be used."""
    try:
        return not pair.chat_template.is_plain
    except ModelError:
        return False


def _checked(source: str) -> str:
    """Return the source of a template. Raises ConfigurationError if it is none."""
    if not isinstance(source, str):
        raise ConfigurationError(f"a chat template is a string, not {shown(source)}")
    try:
        compiled(source)
    except _NO_TEMPLATE as error:
        raise ConfigurationError(f"this is no chat template: {error}") from error
    return source


def _check_lists(arguments: Arguments) -> None:
    """Raise ConfigurationError for tools or documents that are no lists of objects."""
    for name in ("tools", "documents"):
        given = arguments.get(name)
        if given is None:
            continue
        if not isinstance(given, list | tuple) or any(
            not isinstance(one, Mapping) for one in given
        ):
            raise ConfigurationError(f"{name}: expected a list of objects, got {shown(given)}")


def _in_files(model: str, revision: str | None) -> dict[str, str]:
    """Return the templates that are files of their own, by name. Raises ModelError."""
    path = find_file(model, revision, "chat_template.jinja")
    found = {} if path is None else {DEFAULT: read_text(path)}
    more = find_files(model, revision, "additional_chat_templates/*.jinja")
    return found | {one.stem: read_text(one) for one in more}


def _in_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates in a tokenizer_config.json, by name: one, or a list of several."""
    entry = config.get("chat_template")
    entries = entry if isinstance(entry, list) else [{"name": DEFAULT, "template": entry}]
    pairs = [(one.get("name"), one.get("template")) for one in entries if isinstance(one, dict)]
    return {
        name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)
    }
