"""Over HTTP: a message that is continued, and tokens that alone are allowed."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from proto.messages import Role
from tests.process.served import Served, client_of, serving

pytestmark = pytest.mark.process

ASKED: list[Any] = [{"role": "user", "content": "Write a function."}]
BEGUN: list[Any] = [*ASKED, {"role": "assistant", "content": "def read_lines(path"}]
COMMON: dict[str, Any] = {"model": "embedded", "max_tokens": 12, "seed": 4, "temperature": 0.8}


@pytest.fixture(scope="module")
def server(embedded: Pair) -> Iterator[Served]:
    with serving(embedded) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}], ids=["short", "vllm"])
def test_the_last_message_is_continued(
    embedded: Pair, client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    begun = embedded.chat_template.render(BEGUN, continue_final_message=True)
    assert begun.endswith("def read_lines(path")
    want = client.completions.create(prompt=begun, **COMMON).choices[0].text
    extra = {"continue_final_message": True, **fields}
    whole = client.chat.completions.create(messages=BEGUN, extra_body=extra, **COMMON)
    assert whole.choices[0].message.content == want
    parts = client.chat.completions.create(messages=BEGUN, extra_body=extra, stream=True, **COMMON)
    assert "".join(one.choices[0].delta.content or "" for one in parts) == want
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(
            messages=BEGUN, extra_body={**extra, "add_generation_prompt": True}, **COMMON
        )


def test_only_allowed_tokens_come_by_both_routes(embedded: Pair, server: Served) -> None:
    allowed = embedded.encode("def read(self, path):\n    return None")
    params = SamplingParams(
        temperature=0.8, seed=4, max_tokens=12, allowed_token_ids=allowed, ignore_eos=True
    )
    prompt = embedded.encode("def ")
    tokens = tuple(
        token
        for chunk in embedded.generate(prompt, server.llm.asking.speculation, params)[0]
        for token in chunk.tokens
    )
    assert set(tokens) <= set(allowed)
    fields: dict[str, Any] = {"allowed_token_ids": allowed, "ignore_eos": True, **COMMON}
    answer = server.complete("def ", **fields)
    assert embedded.tokenization is not None
    assert answer["choices"][0]["text"] == embedded.tokenization.decode(tokens)
    chat = server.post("/v1/chat/completions", messages=ASKED, **fields).json()
    words = set("def read(self, path):\n    return None")
    assert set(chat["choices"][0]["message"]["content"]) <= words
    for wrong in ([], [embedded.hello(Role.TARGET).logits_size]):
        refused = server.post("/v1/completions", prompt="a", allowed_token_ids=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("allowed_token_ids: ")
