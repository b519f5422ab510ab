"""Conversations times templates: the prompts that `AutoTokenizer.apply_chat_template` makes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from coordinator.api.chat import ChatTemplate
from proto.errors import ConfigurationError, ModelError

CHATML = """{%- if tools %}{{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{%- endif %}
{%- if documents %}
    {%- for one in documents %}{{- one.title ~ ': ' ~ one.text ~ '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is string and not hides %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.content is string %}{{- message.content }}{%- endif %}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>' ~ (call.function | tojson) ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TRIMS = """{{ bos_token }}{% set state = namespace(first=true) %}{% for message in messages %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
{% elif message['content'] is defined %}{{ ' ' + message['content'] | trim + eos_token }}
{% else %}{{ message.tool_calls | length }} calls{{ eos_token }}{% endif %}
{% endfor %}"""
# transformers continues a message only if the template's source has the word `content`.
SHOWS_KEYS = """{# content #}{% for message in messages %}{{ message | tojson }}
{% endfor %}{{ tools | tojson }}{{ documents | tojson }}{{ add_generation_prompt }}"""
THINKS = """{% for message in messages %}{{ message.role }}: {{ message.thinking }}
{{ message.content }}{% endfor %}"""
KEYS = (
    "{# content #}{% for message in messages %}{{ dict(message, role='x') | tojson }}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "trims": TRIMS, "keys": SHOWS_KEYS, "thinks": THINKS, "dict": KEYS}

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read", "arguments": {"path": "a.txt", "line": None}},
}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
ASKED = {"role": "user", "content": "read <a> & 'b'"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [ASKED],
    "answered": [ASKED, {"role": "assistant", "content": "It says: "}],
    "with spaces at its end": [ASKED, {"role": "assistant", "content": "OK!\n"}],
    "not begun yet": [ASKED, {"role": "assistant", "content": ""}],
    "in parts": [{"role": "user", "content": [{"type": "text", "text": "hi "}]}],
    "null beside calls": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    "no content beside calls": [ASKED, {"role": "assistant", "tool_calls": [CALL]}],
    "null calls": [ASKED, {"role": "assistant", "content": "no", "tool_calls": None, "name": None}],
    "a tool's answer": [
        *(ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        {"role": "tool", "tool_call_id": "call_1", "content": "é\n"},
    ],
    "reasoning": [ASKED, {"role": "assistant", "content": "b", "reasoning": "so"}],
    "reasoning_content": [ASKED, {"role": "assistant", "content": "b", "reasoning_content": "so"}],
    "thinking": [ASKED, {"role": "assistant", "content": "b", "thinking": "so"}],
    "two names of reasoning": [
        *(ASKED, {"role": "assistant", "content": "b", "reasoning": "so", "thinking": "and so"}),
    ],
    "a null and a reasoning": [
        *(ASKED, {"role": "assistant", "content": "b", "reasoning_content": None, "reasoning": ""}),
    ],
    "reasoning alone": [ASKED, {"role": "assistant", "content": None, "reasoning": "so"}],
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "others": {"hides": True, "bos_token": "<b>"},
}


def folder_with(folder: Path, **config: Any) -> Path:
    """Put a small tokenizer and its tokenizer_config.json into a folder."""
    Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, [])).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Both:
    """The templates of one folder, as we and as transformers read them."""

    ours: ChatTemplate
    theirs: PreTrainedTokenizerBase

    @classmethod
    def of(cls, folder: Path) -> "Both":
        return cls(ChatTemplate.of_model(str(folder), None), AutoTokenizer.from_pretrained(folder))

    def agree(self, messages: list[dict[str, Any]], given: dict[str, Any], **options: Any) -> str:
        """Assert that both make the same prompt, or both refuse; return it ("": refused)."""
        try:
            want = self.theirs.apply_chat_template(messages, tokenize=False, **given, **options)
        except (TypeError, ValueError, TemplateError):
            with pytest.raises(ConfigurationError):
                self.ours.render(messages, given, **options)
            return ""
        assert self.ours.render(messages, given, **options) == want
        return str(want)


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("templates")
    return Both.of(folder_with(folder, chat_template=TEMPLATES[request.param]))


ENDINGS = [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_prompts_are_those_of_transformers(both: Both, messages: list[dict[str, Any]]) -> None:
    made = [
        both.agree(
            messages,
            given,
            add_generation_prompt=begins_answer,
            continue_final_message=continues,
        )
        for given in ARGUMENTS.values()
        for begins_answer, continues in ENDINGS
    ]
    assert made[0]


def test_the_table_has_prompts_and_refusals(tmp_path: Path) -> None:
    both = Both.of(folder_with(tmp_path, chat_template=CHATML))
    calls = CONVERSATIONS["null beside calls"]
    assert "None" not in both.agree(calls, {"tools": TOOLS}, add_generation_prompt=True)
    reasoned = both.agree(CONVERSATIONS["reasoning"], {}, add_generation_prompt=False)
    assert "<think>so</think>b<|im_end|>" in reasoned
    answered = CONVERSATIONS["answered"]
    continued = both.agree(answered, {}, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("assistant\nIt says: ")
    both = Both.of(folder_with(tmp_path, chat_template=TRIMS))
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert both.agree(answered, {}, **options).endswith("[/INST]\n It says:")
    assert both.agree(calls, {}, **options) == ""


@pytest.mark.parametrize("place", ["list", "list without default", "files", "file and list"])
@pytest.mark.parametrize("given", [{}, {"tools": TOOLS}, {"tools": []}], ids=str)
def test_of_several_templates_the_same_is_taken(
    tmp_path: Path, place: str, given: dict[str, Any]
) -> None:
    named = {"default": "usual", "tool_use": "with tools", "rag": "documents"}
    if place == "list without default":
        del named["default"]
    entries = [{"name": name, "template": text} for name, text in named.items()]
    folder_with(tmp_path, chat_template=None if place == "files" else entries)
    if "file" in place:
        more = tmp_path / "additional_chat_templates"
        more.mkdir()
        (tmp_path / "chat_template.jinja").write_text("usual, of a file")
        (more / "tool_use.jinja").write_text("tools, of a file")
        if place == "file and list":
            (more / "tool_use.jinja").unlink()
            (more / "rag.jinja").write_text("documents, of a file")
    both = Both.of(tmp_path)
    both.agree([ASKED], given)
    assert both.ours.render([ASKED], template="rag") if place != "files" else True
    both.theirs.chat_template = "{{ messages | length }}"
    want = both.theirs.apply_chat_template([ASKED], tokenize=False)
    assert both.ours.render([ASKED], template="{{ messages | length }}") == want == "1"


def test_a_template_gets_plain_values_alone(tmp_path: Path) -> None:
    class Text(str):
        @property
        def secret(self) -> str:
            return "secret"

    @dataclass
    class Part:
        type: str
        picture: object

    both = Both.of(
        folder_with(
            tmp_path,
            chat_template="{{ messages | tojson }}{{ messages[0].content.secret }}"
            "{{ picture }}{{ part | tojson }}",
        )
    )
    given = {"picture": object(), "part": Part("image", object())}
    made = both.agree([{"role": "user", "content": Text("hi")}], given)
    assert made.endswith('<object>{"type": "image", "picture": "<object>"}')
    assert "secret" not in made


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict.__mro__ }}",
        "{{ dict.mro() }}",
        "{{ namespace(_x=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ namespace.mro() }}",
        "{{ messages.clear() }}",
        "{{ tools.__class__ }}",
    ],
)
def test_what_reaches_out_is_refused_by_both(tmp_path: Path, source: str) -> None:
    both = Both.of(folder_with(tmp_path, chat_template=source))
    assert both.agree([ASKED], {"tools": TOOLS}) == ""


def test_what_cannot_be_continued_is_one_line(tmp_path: Path) -> None:
    ours = ChatTemplate.of_model(str(folder_with(tmp_path, chat_template=CHATML)), None)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        ours.render([ASKED], add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ConfigurationError, match="has no text that could be continued"):
        ours.render(CONVERSATIONS["null beside calls"], continue_final_message=True)
    hides = ChatTemplate("{{ messages[0].content }}", {}, "test")
    with pytest.raises(ConfigurationError, match="does not show the last message"):
        hides.render(CONVERSATIONS["answered"], continue_final_message=True)
    with pytest.raises(ConfigurationError, match="tools: expected a list of objects"):
        ours.render([ASKED], {"tools": "read"})
    with pytest.raises(ConfigurationError, match="no chat template"):
        ours.render([ASKED], template="{% if %}")
    with pytest.raises(ModelError, match="is no template"):
        ChatTemplate({"default": "fine", "tool_use": "{% if %}"}, {}, "test")
    alone = ChatTemplate({"tool_use": "tools"}, {}, "test")
    assert alone.render([ASKED], {"tools": TOOLS}) == "tools"
    with pytest.raises(ConfigurationError, match=r"special uses alone \(tool_use\)"):
        alone.render([ASKED])


def test_the_plain_template_shows_calls_and_can_be_continued() -> None:
    plain = ChatTemplate(None, {}, "test")
    made = plain.render(CONVERSATIONS["null beside calls"])
    assert made.endswith(
        'Assistant: [{"name": "read", "arguments": {"path": "a.txt", "line": null}}]\n\nAssistant:'
    )
    assert plain.render(CONVERSATIONS["no content beside calls"]) == made
    continued = plain.render(CONVERSATIONS["answered"], continue_final_message=True)
    assert continued.endswith("Assistant: It says: ")
