"""What `chat` is told on its command line."""

import inspect

import pytest

from coordinator.cli.chat.loop import MAX_TOKENS, chat, template_arguments
from coordinator.cli.generate import generate
from proto.errors import ConfigurationError


def test_arguments_of_the_template_are_a_json_object() -> None:
    assert template_arguments(None) == {}
    given = template_arguments('{"enable_thinking": false, "depth": 2}')
    assert given == {"enable_thinking": False, "depth": 2}


@pytest.mark.parametrize("text", ["", "[1]", "{", "null", "enable_thinking=false", "[" * 100_000])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a JSON object like"):
        template_arguments(text)


def test_what_the_conversation_is_made_of_cannot_be_given() -> None:
    with pytest.raises(ConfigurationError, match="messages is the conversation's own"):
        template_arguments('{"brief": true, "messages": []}')


def test_chat_has_the_flags_of_generate_that_make_sense_for_it() -> None:
    mine, all_flags = inspect.signature(chat).parameters, inspect.signature(generate).parameters
    of_prompts = {"prompt", "prompt_file", "prompt_ids", "chat", "as_json", "show_speculation"}
    of_prompts |= {"json_schema", "regex", "is_dry"}
    missing = {"n", "logprobs", "prompt_logprobs", "max_num_seqs", "trace", "verbose", *of_prompts}
    assert set(all_flags) - set(mine) == missing
    assert set(mine) - set(all_flags) == {"model", "system", "chat_template_kwargs", "drop_oldest"}
    assert mine["max_tokens"].default == MAX_TOKENS
