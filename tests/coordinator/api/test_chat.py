"""Chat templates: rendered as transformers renders them, and in a sandbox."""

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from coordinator.api.chat import ChatTemplate
from proto.errors import ConfigurationError, ModelError

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Wie geht's?\n"},
    {"role": "assistant", "content": "Gut."},
    {"role": "user", "content": "é"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LLAMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% continue %}{% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""
TRIMMED = """{% for message in messages %}
  {%- generation -%}
    {{ message | tojson }}
  {%- endgeneration -%}
{% endfor %}{{ messages | tojson(indent=2) }}"""


@pytest.mark.parametrize("source", [CHATML, LLAMA, TRIMMED])
def test_templates_render_as_in_transformers(source: str) -> None:
    want, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate(source, TOKENS, "test").render(MESSAGES) == want[0]


def test_a_template_reads_its_arguments_and_not_those_of_the_conversation() -> None:
    source = "{{ bos_token }}{{ messages | length }}{{ brief }}{{ add_generation_prompt }}"
    arguments = {"brief": "!", "other": 1, "messages": [], "bos_token": "<b>"}
    want = ChatTemplate(source, TOKENS, "test").render(MESSAGES, arguments)
    assert want == "<b>4!True"
    assert ChatTemplate(source, TOKENS, "test").render(MESSAGES) == "<s>4True"


def test_a_model_without_a_template_gets_a_plain_one(tmp_path: Path) -> None:
    template = ChatTemplate.of_model(str(tmp_path), None)
    assert template.is_plain
    question = [{"role": "user", "content": "Why?"}]
    assert template.render(question) == "User: Why?\n\nAssistant:"


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    config = {"chat_template": "in config {{ bos_token }}{{ eos_token }}"}
    config |= {"bos_token": "<b>", "eos_token": {"content": "<e>", "special": True}}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    assert ChatTemplate.of_model(str(tmp_path), None).render(MESSAGES) == "in config <b><e>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "mine"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.of_model(str(tmp_path), None).render(MESSAGES) == "mine"
    path.write_text(json.dumps({"bos_token": "<b>"}))
    beside = {"chat_template": "of several modalities {{ bos_token }}"}
    (tmp_path / "chat_template.json").write_text(json.dumps(beside))
    rendered = ChatTemplate.of_model(str(tmp_path), None).render(MESSAGES)
    assert rendered == "of several modalities <b>"
    (tmp_path / "chat_template.jinja").write_text("in a file")
    assert ChatTemplate.of_model(str(tmp_path), None).render(MESSAGES) == "in a file"


def test_a_template_that_reads_lists_of_parts_is_given_strings_as_such() -> None:
    source = (
        "{% for one in messages %}{{ one.role }}:"
        "{% for part in one.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
        "{% endfor %};{% endfor %}"
    )
    template = ChatTemplate(source, TOKENS, "test")
    parts = [{"type": "image"}, {"type": "text", "text": "this"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "that"}]
    assert template.render(messages) == "user:this;user:that;"
    assert template.render(messages[1:]) == "user:that;"
    plain = ChatTemplate("{{ messages[0].content }}", TOKENS, "test")
    assert plain.render(messages[1:]) == "that"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ nothing.at_all }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_one_line(source: str) -> None:
    with pytest.raises(ConfigurationError, match="refuses this conversation") as caught:
        ChatTemplate(source, TOKENS, "test").render(MESSAGES)
    assert "\n" not in str(caught.value)


def test_what_is_no_template_or_no_conversation_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no template"):
        ChatTemplate("{% if %}", TOKENS, "test")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: it is no JSON .* get it again"):
        ChatTemplate.of_model(str(tmp_path), None)
    template = ChatTemplate(CHATML, TOKENS, "test")
    with pytest.raises(ConfigurationError, match="the conversation is empty"):
        template.render([])
    with pytest.raises(ConfigurationError, match='a "role" and a "content"'):
        template.render([{"role": "user"}])


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"[" * 100_000, b"[]", b"{"],
    ids=["not UTF-8", "deep", "a list", "torn"],
)
def test_files_that_are_no_text_or_no_object_are_named(tmp_path: Path, content: bytes) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match="tokenizer_config"):
            ChatTemplate.of_model(str(tmp_path), None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"cannot read .*chat_template\.jinja"):
        ChatTemplate.of_model(str(tmp_path), None)


@pytest.mark.parametrize("entry", [3, {}, ["x"], [{"name": []}], [None]])
def test_an_entry_that_is_no_template_counts_as_none(tmp_path: Path, entry: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert ChatTemplate.of_model(str(tmp_path), None).is_plain


def test_a_template_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").mkdir()
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        ChatTemplate.of_model(str(tmp_path), None)
