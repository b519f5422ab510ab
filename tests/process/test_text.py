"""The texts of a real process with a tokenizer of the sentencepiece kind."""

import asyncio
import re
from collections.abc import Iterator

import pytest

from coordinator import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from coordinator.api.config import SpeculationConfig
from coordinator.api.prompts import Tokenization
from coordinator.api.requests import Batch, Request
from coordinator.cli.writers import ShownPrompt, TextWriter
from tests.tiny_models import make_model
from tests.tiny_tokenizer import sentencepiece_tokenizer

pytestmark = pytest.mark.process

TOKENIZER = sentencepiece_tokenizer()
TOKENIZATION = Tokenization(TOKENIZER)
PROMPT = "the text is"
THE = TOKENIZER.token_to_id("▁the")
# No bytes and no special tokens: their texts are in tests/coordinator/text/test_detokenization.py.
PARAMS = SamplingParams(
    max_tokens=24, ignore_eos=True, logit_bias=dict.fromkeys(range(259), -100.0), logprobs=0
)
BEGINS_A_WORD = PARAMS.model_copy(
    update={"logit_bias": {**PARAMS.logit_bias, THE: 100.0}, "max_tokens": 3}
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A target that copies its drafts from the text: one process."""
    folder = make_model("llama", tmp_path_factory.mktemp("target"), vocab=310)
    assert TOKENIZER.get_vocab_size() < 310
    TOKENIZER.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), speculative_config={"method": "ngram"}, dtype="float32") as made:
        yield made


def behind(prompt: list[int], answer: list[int]) -> str:
    """What decoding both together says beyond the prompt."""
    whole, begun = (TOKENIZATION.decode(tuple(ids)) for ids in (prompt + answer, prompt))
    return whole.removeprefix(begun)


def test_the_text_keeps_its_first_space_however_it_is_asked_for(llm: LLM) -> None:
    ids = list(TOKENIZATION.encode(PROMPT))

    async def in_a_loop(kind: RequestOutputKind) -> list[RequestOutput]:
        parts = AsyncLLM.of(llm.pair, llm._speculation).generate(
            PROMPT, BEGINS_A_WORD, output_kind=kind
        )
        return [part async for part in parts]

    outputs = [
        *llm.generate([PROMPT, ids], BEGINS_A_WORD),
        *asyncio.run(in_a_loop(RequestOutputKind.FINAL_ONLY)),
        *llm.chat([{"role": "user", "content": PROMPT}], BEGINS_A_WORD),
    ]
    assert [output.outputs[0].text for output in outputs] == [" the the the"] * 4
    for parts in (
        list(llm.stream(PROMPT, BEGINS_A_WORD)),
        asyncio.run(in_a_loop(RequestOutputKind.DELTA)),
    ):
        assert "".join(part.outputs[0].text for part in parts) == " the the the"
    for row in outputs[0].outputs[0].logprobs or ():
        assert row[THE].decoded_token == " the"


def test_every_text_of_a_prompt_reads_as_it_does_behind_it(llm: LLM) -> None:
    sampled = PARAMS.model_copy(update={"temperature": 1.0, "n": 4, "seed": 1})
    for prompt in (PROMPT, [1], [THE, 3 + 0xF0]):
        (output,) = llm.generate([prompt], sampled)
        assert len({one.text for one in output.outputs}) == 4
        for one in output.outputs:
            assert one.text == behind(output.prompt_token_ids, one.token_ids)


def test_a_stop_string_begins_with_the_space_behind_the_prompt(llm: LLM) -> None:
    stopped = BEGINS_A_WORD.model_copy(update={"stop": (" the",)})
    (made,) = llm.generate(PROMPT, stopped)[0].outputs
    assert (made.text, made.token_ids, made.stop_reason) == ("", [THE], " the")


def test_the_speculation_in_sight_shows_the_same_text(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    speculation = SpeculationConfig()
    ids = TOKENIZATION.encode(PROMPT)
    for params in (PARAMS, BEGINS_A_WORD):
        writer = TextWriter(speculation.policy, params, show_speculation=True)
        writer.begin(ShownPrompt(0, 1, PROMPT, llm.pair.decoder))
        request = Request(llm.pair, speculation, PROMPT, ids, params)
        for step in Batch(llm.pair, [request]).steps():
            writer.add(step.emit, step.part)
        shown = re.sub(r"\[-.*?-\]|\{\+|\+\}", "", capsys.readouterr().out)
        (made,) = request.whole().outputs
        assert shown == made.text == behind(list(ids), made.token_ids)
