"""Long prompts: read by a process of their own, as any other, and beside texts that go on."""

import errno
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.api import long_texts, own_process, reading
from coordinator.api.chat import USUAL, ChatTemplate, PromptForm
from coordinator.api.encoding import prompt_of
from coordinator.api.long_texts import LongTexts
from coordinator.api.models.tokenizers import OUR_TARGET
from coordinator.api.pair import Pair
from coordinator.api.prompts import HERE, Tokenization, TooManyTokensError
from coordinator.api.token_names import TokenNames
from proto.errors import ConfigurationError
from tests.process.served import serving
from tests.tiny_tokenizer import sentencepiece_tokenizer

pytestmark = pytest.mark.process

# On a quiet machine it is 0.2 s (`python -m tests.soak --gaps`); where one request of this size
# held Python's interpreter, it was 2 to 5 s.
GAP_S = 1.2
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"


def text_of(num_characters: int, seed: int = 1) -> str:
    draw = random.Random(seed)
    words = ["the river", " ", "\n\n", "中文", "🙂", "<s>", "e\u0301", "   ", "bridge,", "\t"]
    size, parts = 0, []
    while size < num_characters:
        parts.append(draw.choice(words))
        size += len(parts[-1])
    return "".join(parts)


@pytest.fixture(params=["ours", "sentencepiece", "split"])
def tokenization(request: pytest.FixtureRequest) -> Iterator[Tokenization]:
    if request.param == "ours":
        found = Tokenization.of_model(str(OUR_TARGET), None)
        assert found is not None
    else:
        tokenizer = sentencepiece_tokenizer()
        tokenizer.encode_special_tokens = request.param == "split"
        found = Tokenization(tokenizer)
    yield found
    found.long_texts.close()


def test_a_long_text_has_the_ids_that_the_usual_call_gives(tokenization: Tokenization) -> None:
    for size in (100, HERE // 2, 2 * HERE):
        text = text_of(size)
        for special in (True, False):
            usual = tokenization.raw.encode(text, add_special_tokens=special).ids
            assert tokenization.encode(text, special_tokens=special) == tuple(usual)
    with pytest.raises(TooManyTokensError) as found:
        tokenization.encode(text, special_tokens=False, most=len(usual) - 1)
    assert found.value.num_tokens <= len(usual)
    assert tokenization.encode(text, special_tokens=False, most=len(usual)) == tuple(usual)


@pytest.mark.long
def test_a_long_conversation_and_an_echo_are_as_those_made_here(
    tokenization: Tokenization,
) -> None:
    template = ChatTemplate(TEMPLATE, {}, "a model")
    messages = [{"role": "user", "content": text_of(HERE)}, {"role": "assistant", "content": "ab"}]
    form = PromptForm(continue_final_message=True)
    prompt, ids = prompt_of(tokenization, template, (messages, {}), form, most=None)
    assert prompt == template.render(messages, continue_final_message=True)
    assert ids == tokenization.encode_here(prompt, special_tokens=False)
    names = TokenNames(tokenization)
    assert names.echo(prompt, ids) == names.echo_here(prompt, ids)


def test_what_a_template_refuses_is_refused_in_the_same_words(tokenization: Tokenization) -> None:
    template = ChatTemplate("{{ raise_exception('no such role') }}", {}, "a model")
    said = []
    for size in (1, HERE):
        messages = [{"role": "user", "content": "x" * size}]
        with pytest.raises(ConfigurationError) as found:
            prompt_of(tokenization, template, (messages, {}), USUAL, most=None)
        said.append(str(found.value))
    assert said[0] == said[1]
    assert "no such role" in said[0]


@pytest.fixture
def ours() -> Iterator[Tokenization]:
    found = Tokenization.of_model(str(OUR_TARGET), None)
    assert found is not None
    yield found
    found.long_texts.close()


def test_a_template_without_an_end_costs_the_one_request(
    ours: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_texts, "PATIENCE", 0)
    monkeypatch.setattr(long_texts, "START_S", 3.0)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(loop, {}, "a model")
    messages = [{"role": "user", "content": "x" * HERE}]
    with pytest.raises(ConfigurationError, match="too much time or memory"):
        prompt_of(ours, template, (messages, {}), USUAL, most=None)
    text = "a b" * HERE
    assert ours.encode(text) == ours.encode_here(text)


def test_a_process_that_has_ended_for_want_of_questions_is_started_again(
    ours: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a b" * HERE
    first = ours.encode(text)
    process = ours.long_texts._process
    assert process is not None
    process._asked.close()  # as it sees it when nobody asks: it ends by itself
    assert process.has_ended()
    monkeypatch.setattr(process, "_asked", os.fdopen(os.open(os.devnull, os.O_RDONLY)))
    monkeypatch.setattr(process, "ask", lambda *_: None)
    assert ours.encode(text) == first


def test_the_process_limits_its_memory_and_its_priority(ours: Tokenization) -> None:
    ours.encode("a b" * HERE)
    process = ours.long_texts._process
    assert process is not None
    folder = Path(f"/proc/{process._process.pid}")
    (line,) = [one for one in (folder / "limits").read_text().splitlines() if "data size" in one]
    assert 0 < int(line.split()[3]) <= reading.MEMORY_BYTES
    lower = os.getpriority(os.PRIO_PROCESS, process._process.pid) - os.nice(0)
    assert lower == min(reading.NICENESS, 19 - os.nice(0))
    assert (folder / "oom_score_adj").read_text().strip() == "1000"


def test_values_of_json_are_counted_and_bytes_that_are_none_have_none() -> None:
    texts = LongTexts(bytes)
    try:
        body = {"a": [1, 2, {"b": []}], "c": {"d": 1}}
        assert texts.count(json.dumps(body).encode(), 100) == (7, 9)
        assert texts.count(b"[[" + b"1," * 10 + b"1]]", 3)[0] == 12
        assert texts.count(b"[" * 100_000, 100) == (0, 0)
    finally:
        texts.close()


@pytest.mark.timed
def test_a_stream_goes_on_beside_eight_large_requests(embedded: Pair) -> None:
    ends = threading.Event()
    gaps: list[float] = []
    big = {
        "/tokenize": [json.dumps({"prompt": text_of(800_000)}).encode()] * 2,
        "/v1/completions": [
            json.dumps({"prompt": "x y " * 800_000, "max_tokens": 1}).encode(),
            b'{"prompt":[' + b",".join([b"[1]"] * 800_000) + b"]}",
            b'{"prompt":[' + b",".join([b"1"] * 1_600_000) + b"]}",
            b'{"prompt":"a",' + b",".join(b'"x%d":1' % one for one in range(240_000)) + b"}",
        ],
        "/v1/chat/completions": [
            b'{"messages":[' + b",".join([b"{}"] * 800_000) + b"]}",
            json.dumps({"messages": [{"role": "user", "content": "x" * (3 << 20)}]}).encode(),
        ],
    }
    with serving(embedded) as server:

        def stream() -> None:
            body = {"prompt": "The river", "max_tokens": 360, "ignore_eos": True, "stream": True}
            while not ends.is_set():
                with (
                    server.client() as client,
                    client.stream("POST", "/v1/completions", json=body) as answer,
                ):
                    last = time.monotonic()
                    for _ in answer.iter_lines():
                        now = time.monotonic()
                        gaps.append(now - last)
                        last = now

        def ask(path: str, body: bytes) -> int:
            with server.client() as client:
                headers = {"content-type": "application/json"}
                return client.post(path, content=body, headers=headers).status_code

        reader = threading.Thread(target=stream)
        reader.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                asked = [(path, body) for path, bodies in big.items() for body in bodies]
                statuses = list(pool.map(ask, *zip(*asked, strict=True)))
        finally:
            ends.set()
            reader.join()
    assert statuses == [200, 200, 400, 400, 400, 400, 400, 400]
    assert max(gaps) < GAP_S


def test_after_the_end_nobody_starts_another_process(ours: Tokenization) -> None:
    reader = LongTexts(ours.packed)
    assert reader.encode("a cat", special_tokens=False, most=None).num_tokens
    reader.close()
    ended = reader._process
    with pytest.raises(ConfigurationError):
        reader.encode("a cat", special_tokens=False, most=None)
    assert reader._process is ended, "no other one was started"


def test_a_process_to_which_there_are_no_pipes_is_ended_and_the_line_says_why(
    ours: Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = own_process.start

    def noted(module: str, what: str) -> "subprocess.Popen[bytes]":
        started.append(start(module, what))
        return started[-1]

    def none_left(_number: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(own_process, "start", noted)
    monkeypatch.setattr(os, "dup", none_left)
    with pytest.raises(ConfigurationError, match=r"reads the prompt .* free memory or end others"):
        LongTexts(ours.packed).encode("a cat", special_tokens=False, most=None)
    assert [process.poll() is not None for process in started] == [True]
