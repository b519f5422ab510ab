"""THE table of the fields that requests may have: OpenAI's, vLLM's and ours (pure).

A known field that changes a text is obeyed or refused, never ignored: each route obeys those that
its body declares, and `check` refuses the others unless their value asks for nothing. Fields that
nobody has published are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from proto.errors import ConfigurationError, shown

MAX_FIELDS = 1024  # of a request's body, unknown ones included


class Route(StrEnum):
    """A route that reads the fields of the table."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    TOKENIZE = "/tokenize"


COMPLETIONS, CHAT, TOKENIZE = (Route.COMPLETIONS,), (Route.CHAT,), (Route.TOKENIZE,)
TEXTS = COMPLETIONS + CHAT
CONVERSATIONS = CHAT + TOKENIZE
ALL = TEXTS + TOKENIZE


@dataclass(frozen=True, slots=True)
class Known:
    """What becomes of a field. Where no route is named, it changes no text, and is accepted.

    obeyed    routes that do what it says
    refused   routes that refuse it, unless its value is null or neutral
    neutral   values that ask for nothing
    instead   why it is refused, or what to use in its place
    """

    obeyed: tuple[Route, ...] = ()
    refused: tuple[Route, ...] = ()
    neutral: tuple[object, ...] = ()
    instead: str = ""


def _obeyed(names: str, routes: tuple[Route, ...]) -> dict[str, Known]:
    return dict.fromkeys(names.split(), Known(routes))


def _refused(routes: tuple[Route, ...], instead: str, *neutral: object) -> Known:
    return Known((), routes, neutral, instead)


_NO_FUNCTIONS = "use tools and tool_choice"
_ENGINE = "there is nothing here that reads it"

FIELDS: Mapping[str, Known] = {
    **_obeyed("model", ALL),
    **_obeyed("prompt", COMPLETIONS + TOKENIZE),
    **_obeyed("messages tools tool_choice parallel_tool_calls", CONVERSATIONS),
    **_obeyed("chat_template_kwargs documents reasoning_effort", CONVERSATIONS),
    **_obeyed("add_generation_prompt continue_final_message", CONVERSATIONS),
    **_obeyed("add_special_tokens", ALL),
    **_obeyed("return_token_strs", TOKENIZE),
    **_obeyed("max_tokens n best_of seed stop stream stream_options logprobs", TEXTS),
    **_obeyed("max_completion_tokens top_logprobs include_reasoning", CHAT),
    **_obeyed("temperature top_p top_k min_p", TEXTS),
    **_obeyed("presence_penalty frequency_penalty repetition_penalty", TEXTS),
    **_obeyed("logit_bias bad_words allowed_token_ids stop_token_ids", TEXTS),
    **_obeyed("ignore_eos min_tokens include_stop_str_in_output skip_special_tokens", TEXTS),
    **_obeyed("response_format structured_outputs", TEXTS),
    **_obeyed("guided_json guided_regex guided_choice guided_grammar", TEXTS),
    **_obeyed("speculative return_progress return_token_ids resume", TEXTS),
    "echo": Known(COMPLETIONS, CHAT, (False,), "continue_final_message continues a message"),
    # These change no text.
    **dict.fromkeys(("user", "metadata", "store", "safety_identifier", "service_tier"), Known()),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), Known()
    ),
    **dict.fromkeys(("prediction", "priority", "request_id", "session_id"), Known()),
    **dict.fromkeys(("stream_interval", "guided_decoding_backend", "truncation_side"), Known()),
    # Of beam search, which there is none.
    **dict.fromkeys(("length_penalty", "early_stopping"), Known()),
    # No tokenizer here puts spaces there; and texts alone are read.
    **dict.fromkeys(("spaces_between_special_tokens", "media_io_kwargs"), Known()),
    **dict.fromkeys(("mm_processor_kwargs", "return_mm_kwargs"), Known()),
    **dict.fromkeys(("return_token_offsets", "routed_experts_prompt_start"), Known()),
    # These would, or they ask for what an answer here does not have.
    "suffix": _refused(COMPLETIONS, "a text is continued at its end only", ""),
    "prompt_embeds": _refused(COMPLETIONS, "give the prompt as text or token ids"),
    "chat_template": _refused(CONVERSATIONS, "the target's own template is used"),
    "truncate_prompt_tokens": _refused(ALL, "shorten the prompt itself", -1),
    "functions": _refused(CONVERSATIONS, _NO_FUNCTIONS, []),
    "function_call": _refused(CONVERSATIONS, _NO_FUNCTIONS, "none", "auto"),
    "audio": _refused(CHAT, "answers are texts"),
    "modalities": _refused(CHAT, "answers are texts", ["text"]),
    "moderation": _refused(CHAT, "nothing is moderated here"),
    "verbosity": _refused(CHAT, "say in the prompt how long the answer should be", "medium"),
    "web_search_options": _refused(CHAT, "nothing is searched here"),
    "prompt_logprobs": _refused(TEXTS, "echo with logprobs on /v1/completions scores a prompt"),
    "logprob_token_ids": _refused(TEXTS, "logprobs names the likeliest tokens"),
    "return_tokens_as_token_ids": _refused(TEXTS, "tokens are named by their text", False),
    "return_prompt_text": _refused(CHAT, "/tokenize has the ids of a prompt", False),
    "use_beam_search": _refused(TEXTS, "n samples several texts", False),
    "watermarking": _refused(TEXTS, "texts have no watermark here", False),
    "logits_processors": _refused(TEXTS, "use logit_bias, bad_words or allowed_token_ids", []),
    "repetition_detection": _refused(TEXTS, "use repetition_penalty or stop"),
    "thinking_token_budget": _refused(TEXTS, "max_tokens limits the whole answer", -1),
    "guided_json_object": _refused(TEXTS, "use response_format", False),
    "guided_whitespace_pattern": _refused(
        TEXTS, "use disable_any_whitespace in structured_outputs"
    ),
    "structural_tag": _refused(TEXTS, "use structured_outputs"),
    "cache_salt": _refused(TEXTS, "texts share the cache of what they begin alike"),
    "kv_transfer_params": _refused(TEXTS, _ENGINE, {}),
    "ec_transfer_params": _refused(TEXTS, _ENGINE, {}),
    "vllm_xargs": _refused(TEXTS, _ENGINE, {}),
}


def check(given: Mapping[str, Any], route: Route) -> None:
    """Raise ConfigurationError for a known field of a request that this route does not obey.

    The same for too many fields.
    """
    if len(given) > MAX_FIELDS:
        raise ConfigurationError(f"the body has {len(given)} fields; at most {MAX_FIELDS}")
    for name, value in given.items():
        known = FIELDS.get(name, Known())
        if value is None or route not in known.refused:
            continue
        if not any(type(value) is type(one) and value == one for one in known.neutral):
            raise ConfigurationError(
                f"{name}: {shown(value)} is not supported on {route}; leave it out: {known.instead}"
            )
