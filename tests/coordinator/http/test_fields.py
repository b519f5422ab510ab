"""Known fields of requests are obeyed, harmless or refused; table, bodies and docs agree."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat

from coordinator.api.structured import StructuredOutputsParams
from coordinator.http.bodies import Body, ChatBody, CompletionBody, TokenizeBody
from coordinator.http.fields import FIELDS, Known, Route
from proto.errors import ConfigurationError
from proto.installation import ROOT

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[Route, tuple[type[Body], dict[str, Any]]] = {
    Route.COMPLETIONS: (CompletionBody, {"prompt": "x"}),
    Route.CHAT: (ChatBody, {"messages": MESSAGES}),
    Route.TOKENIZE: (TokenizeBody, {"prompt": "x"}),
}
# vLLM's own fields, as its requests for completions, chats and tokens declare them.
OF_VLLM = re.findall(
    "[a-z_]+",
    """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents echo ec_transfer_params ignore_eos
include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids
media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_embeds prompt_logprobs
reasoning_effort repetition_detection repetition_penalty request_id response_format
return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_token_strs
return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
watermarking guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern guided_json_object structural_tag logits_processors early_stopping
""",
)
OF_OPENAI = [
    *completions.CompletionCreateParamsBase.__annotations__,
    *chat.CompletionCreateParamsBase.__annotations__,
    "stream",
]
REFUSED = [(name, route) for name, known in FIELDS.items() for route in known.refused]


def read(route: Route, given: Mapping[str, Any]) -> Body:
    body, needed = BODIES[route]
    return body.model_validate({**needed, **given})


def test_every_published_field_is_in_the_table() -> None:
    assert set(OF_OPENAI + OF_VLLM) - set(FIELDS) == set()


@pytest.mark.parametrize("route", Route)
def test_a_route_obeys_the_fields_that_its_body_has(route: Route) -> None:
    obeyed = {name for name, known in FIELDS.items() if route in known.obeyed}
    assert obeyed == set(BODIES[route][0].model_fields)
    assert not any({*known.obeyed} & {*known.refused} for known in FIELDS.values())


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("name", FIELDS)
def test_null_is_as_if_a_field_were_left_out(route: Route, name: str) -> None:
    needed = BODIES[route][1]
    if name not in needed:
        assert read(route, {name: None}) == read(route, {})


@pytest.mark.parametrize(("name", "route"), REFUSED)
def test_a_field_that_is_not_obeyed_is_refused_unless_it_asks_for_nothing(
    name: str, route: Route
) -> None:
    for value in FIELDS[name].neutral:
        assert read(route, {name: value}) == read(route, {})
    for value in ({"a": 1}, "something", 7):
        with pytest.raises(ConfigurationError) as caught:
            read(route, {name: value})
        assert str(caught.value).startswith(f"{name}: ")
        assert FIELDS[name].instead in str(caught.value)


@pytest.mark.parametrize("value", [0, 1, 1.0])
def test_a_number_is_no_neutral_truth(value: float) -> None:
    with pytest.raises(ConfigurationError, match="use_beam_search"):
        read(Route.CHAT, {"use_beam_search": value})


def test_fields_that_nobody_has_published_are_ignored() -> None:
    for route in Route:
        assert read(route, {"nobodys": {"a": 1}, "user": "me", "priority": 5}) == read(route, {})


def treatment(known: Known) -> str:
    """Where and how a field is treated, in the words of the page."""
    told = []
    if known.obeyed:
        told.append(f"obeyed on {places(known.obeyed)}")
    if known.refused:
        told.append(f"refused on {places(known.refused)}")
    return "; ".join(told) or "accepted, as it changes no text"


def places(routes: tuple[Route, ...]) -> str:
    return ", ".join(f"`{route}`" for route in routes)


def written(name: str) -> str:
    """A field, with the values that are accepted where it is refused."""
    known = FIELDS[name]
    values = " or ".join(f"`{json.dumps(value)}`" for value in known.neutral)
    return f"`{name}` ({values})" if values else f"`{name}`"


def test_the_page_about_serving_has_the_table() -> None:
    rows: dict[str, list[str]] = {}
    for name, known in FIELDS.items():
        rows.setdefault(treatment(known), []).append(written(name))
    table = [f"| {how} | {', '.join(names)} |" for how, names in rows.items()]
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    found = re.findall(r"^\| (?:obeyed|refused|accepted).*\|$", page, re.MULTILINE)
    assert found == table


# What clients send that fill in every field, where they want nothing of it.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "seed": -1,
    "stop": [],
    "stream": False,
    "logit_bias": {},
    "temperature": 1.0,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "bad_words": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "response_format": {"type": "text"},
}
NEUTRAL_IN_CHAT = {
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
}


@pytest.mark.parametrize("name", [*NEUTRAL, *NEUTRAL_IN_CHAT])
def test_a_value_that_asks_for_nothing_changes_no_parameter(name: str) -> None:
    given = {name: (NEUTRAL | NEUTRAL_IN_CHAT)[name]}
    body = ChatBody.model_validate({"messages": MESSAGES, **given})
    without = ChatBody.model_validate({"messages": MESSAGES})
    assert body.params(0) == without.params(0)
    assert body.arguments() == without.arguments()
    if name in NEUTRAL:
        assert CompletionBody.model_validate({"prompt": "x", **given}).params(
            0
        ) == CompletionBody.model_validate({"prompt": "x"}).params(0)


def test_the_form_of_vllm_with_all_its_fields_is_the_form_alone() -> None:
    nothing = {"regex": None, "whitespace_pattern": None, "structural_tag": None}
    nothing |= {"disable_fallback": False, "disable_additional_properties": False}
    form = {"json": {"type": "object"}}
    filled = CompletionBody.model_validate({"prompt": "x", "structured_outputs": form | nothing})
    assert filled.form() == StructuredOutputsParams(json={"type": "object"})
    for more in ({"disable_additional_properties": True}, {"whitespace_pattern": " "}):
        body = CompletionBody.model_validate({"prompt": "x", "structured_outputs": form | more})
        with pytest.raises(ConfigurationError, match="structured_outputs has no"):
            body.form()
