"""Prompts of conversations and texts, by what `LLM.chat` and requests say of their form."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from coordinator.api.asking import Asking
from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.llm import LLM
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.prompts import Tokenization
from coordinator.api.requests import Request
from coordinator.api.vllm import TargetTokenizer
from coordinator.http.bodies import ChatBody, CompletionBody
from proto.errors import ConfigurationError

LETTERS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
DEFAULT = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for one in messages %}[{{ one.role }}]{{ one.content }}[end]{% endfor %}"
    "{% if brief %}[brief]{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
WITH_TOOLS = "{{ tools | length }} tools:{% for one in messages %}{{ one.content }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "read"}}]
ASKED = [{"role": "user", "content": "hi"}]
CALLED = "tool_calls[0].function.arguments"
BEGUN = [*ASKED, {"role": "assistant", "content": "Well,"}]


class Loaded(Pair):
    """A pair whose nodes are loaded, as far as prompts go."""

    def __init__(self, folder: Path) -> None:
        self.config = PairConfig(target=str(folder), drafter=str(folder))
        self.tokenization = Tokenization.of_model(str(folder), None)

    def simulated(self) -> None:
        """Nothing is."""

    def check(self, prompt: tuple[int, ...]) -> None:
        """Any prompt will do."""

    def reviewed_params(self, params: object) -> SamplingParams:
        """They are as they are."""
        assert isinstance(params, SamplingParams)
        return params


class Asked(LLM):
    """Keeps the prompts of its requests in place of answering them."""

    def __init__(self, folder: Path) -> None:
        self.pair = Loaded(folder)
        self.asking = Asking(self.pair, SpeculationConfig())

    def _check_open(self) -> None:
        """It is."""

    def _answers(self, requests: Sequence[Request], _: object) -> Any:
        return [(one._prompt, one.prompt_ids) for one in requests]


def a_folder(folder: Path, template: object) -> Path:
    """A tokenizer of letters that puts <s> in front of each text, and a template."""
    words = {word: number for number, word in enumerate(["<s>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"bos_token": "<s>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    named = {"default": DEFAULT, "tool_use": WITH_TOOLS}
    entries = [{"name": name, "template": source} for name, source in named.items()]
    return a_folder(tmp_path, entries)


WAYS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "as usual": (ASKED, {}, {"add_generation_prompt": True}),
    "no answer begins": (ASKED, *[{"add_generation_prompt": False}] * 2),
    "continued": (BEGUN, *[{"continue_final_message": True, "add_generation_prompt": False}] * 2),
    "continued, in short": (BEGUN, *[{"continue_final_message": True}] * 2),
    "tools": (ASKED, {"tools": TOOLS}, {"tools": TOOLS}),
    "variables": (
        ASKED,
        {"chat_template_kwargs": {"brief": True}},
        {"brief": True, "add_generation_prompt": True},
    ),
    "another template": (ASKED, *[{"chat_template": "{{ messages | length }}"}] * 2),
    "a named template": (ASKED, *[{"chat_template": "tool_use", "tools": []}] * 2),
}


@pytest.mark.parametrize(("messages", "given", "theirs"), WAYS.values(), ids=WAYS.keys())
def test_chat_makes_the_prompt_that_transformers_makes(
    folder: Path, messages: list[dict[str, Any]], given: dict[str, Any], theirs: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    want = tokenizer.apply_chat_template(messages, tokenize=False, **theirs)
    want_ids = tokenizer.encode(want, add_special_tokens=False)
    llm = Asked(folder)
    assert llm.chat(messages, **given) == [(want, tuple(want_ids))]
    assert llm.chat([messages, messages], **given) == [(want, tuple(want_ids))] * 2
    ours = TargetTokenizer(llm.pair)
    assert ours.apply_chat_template(messages, tokenize=False, **theirs) == want
    assert ours.apply_chat_template(messages, **theirs) == want_ids


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"path": "a"}', '{"path": "a"}'),
        ({"path": "a"}, '{"path": "a"}'),
        ("", "{}"),
        (None, "{}"),
        ('{"pa', '"{\\"pa"'),
    ],
)
def test_chat_gives_templates_the_arguments_of_past_calls_as_a_dict(
    tmp_path: Path, arguments: object, shown: str
) -> None:
    """As in vLLM; OpenAI's API has them as a JSON text. transformers gives on what it is given."""
    llm = Asked(a_folder(tmp_path, f"{{{{ messages[0].{CALLED} | tojson }}}}"))
    call = {"type": "function", "function": {"name": "read", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    ((prompt, _),) = llm.chat([message])
    assert prompt == shown
    assert call["function"] == {"name": "read", "arguments": arguments}  # it stays as it was


def test_chat_takes_the_calls_that_openais_client_returned(tmp_path: Path) -> None:
    llm = Asked(a_folder(tmp_path, f"{{{{ messages[0].{CALLED} | tojson }}}}"))
    function = {"name": "read", "arguments": '{"path": "a"}'}
    call = ChatCompletionMessageFunctionToolCall(id="1", type="function", function=function)
    ((prompt, _),) = llm.chat([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert prompt == '{"path": "a"}'


def test_apply_chat_template_gives_on_the_arguments_as_they_are(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, f"{{{{ messages[0].{CALLED} | tojson }}}}")
    call = {"type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    want = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    ours = TargetTokenizer(Loaded(folder))
    assert ours.apply_chat_template(messages, tokenize=False) == want


def test_what_cannot_be_a_form_is_refused_in_one_line(folder: Path) -> None:
    llm = Asked(folder)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"chat_template_kwargs": "brief"}, "chat_template_kwargs: expected a dict"),
        ({"chat_template_kwargs": "brief", "tools": TOOLS}, "chat_template_kwargs: expected a di"),
        ({"tools": "read"}, "tools: expected a list of objects"),
        ({"tools": ["read"]}, "tools: expected a list of objects"),
        ({"chat_template": 3}, "a chat template is a string"),
        ({"chat_template": "{% if %}"}, "no chat template"),
    ]
    for given, line in wrong:
        with pytest.raises(ConfigurationError, match=line) as caught:
            llm.chat(BEGUN, **given)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("has_template", [True, False], ids=["template", "plain"])
def test_a_request_says_whether_the_tokenizer_adds_its_tokens(
    tmp_path: Path, *, has_template: bool
) -> None:
    pair = Loaded(a_folder(tmp_path, "{{ messages[0].content }}" if has_template else None))
    asking = Asking(pair, SpeculationConfig())

    def ids_of(**fields: Any) -> tuple[int, ...]:
        body = ChatBody(messages=ASKED, **fields)
        arguments, form = body.arguments(), body.prompt_form()
        (one,) = asking.chat_requests(body.conversation(), None, None, arguments, form)
        return one.prompt_ids

    bare = ids_of(add_special_tokens=False)
    assert 0 not in bare
    assert ids_of(add_special_tokens=True) == (0, *bare)
    assert ids_of() == (bare if has_template else (0, *bare))
    (text,) = asking.requests("hi", None)
    (without,) = asking.requests("hi", None, add_special_tokens=False)
    assert text.prompt_ids == (0, *without.prompt_ids)
    (by_ids,) = asking.requests([3, 4], None, add_special_tokens=True)
    assert by_ids.prompt_ids == (3, 4)


def test_bodies_have_vllms_fields_of_a_prompts_form() -> None:
    form = ChatBody(messages=BEGUN).prompt_form()
    assert (form.add_generation_prompt, form.continue_final_message) == (None, False)
    fields: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    form = ChatBody(messages=BEGUN, **fields).prompt_form()
    assert (form.add_generation_prompt, form.continue_final_message) == (False, True)
    assert CompletionBody(prompt="a").add_special_tokens is None
    assert CompletionBody(prompt="a", add_special_tokens=False).add_special_tokens is False
    params = CompletionBody(prompt="a", allowed_token_ids=[3, 4]).params(0)
    assert params.allowed_token_ids == (3, 4)
    with pytest.raises(ConfigurationError, match="allowed_token_ids: expected at least 1 of them"):
        ChatBody(messages=BEGUN, allowed_token_ids=[]).params(0)
