"""Several texts of one call on real processes: each is what it is alone."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from coordinator import LLM, AsyncLLM, SamplingParams
from proto.errors import NodeError
from proto.messages import Role
from tests.process.patience import wait_for
from tests.tiny_models import make_model, make_noised
from tests.tiny_tokenizer import VOCAB_SIZE, save_bytewise_tokenizer

pytestmark = pytest.mark.process

PROMPTS = ["one", "two, three", "four five six", "7", "eight" * 9, "nine", "ten ten", "\n"]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
SOON_S = 3.0  # several heartbeats


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Eight texts at once, if the nodes have room for as many; drafts are right at times."""
    root = tmp_path_factory.mktemp("models")
    target = make_model("llama", root / "target", vocab=VOCAB_SIZE + 3)
    drafter = make_noised(target, root / "drafter", 0.2)
    for folder in (target, drafter):
        save_bytewise_tokenizer(folder)
    names = str(target), str(drafter)
    with LLM(*names, dtype="float32", max_model_len=1000, max_num_seqs=8) as made:
        yield made


def ids_of(llm: LLM, prompts: list[str], params: SamplingParams) -> list[list[int]]:
    """The tokens of each prompt's texts, in one call."""
    made = [output.outputs for output in llm.generate(prompts, params)]
    return [text.token_ids for texts in made for text in texts]


def one_by_one(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """The same, a call for each prompt."""
    return [tokens for prompt in PROMPTS for tokens in ids_of(llm, [prompt], params)]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """What comes of PROMPTS one by one."""
    return one_by_one(llm, GREEDY)


def marks_of(llm: LLM) -> list[int]:
    """How many texts each node has, by its last heartbeat."""
    nodes = [llm.pair.service.registry.of(role) for role in Role]
    return [len(node.marks) for node in nodes if node is not None]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_eight_prompts_in_one_call_are_what_they_are_one_by_one(
    llm: LLM, params: SamplingParams
) -> None:
    together = ids_of(llm, PROMPTS, params)
    assert together == one_by_one(llm, params)
    assert len({tuple(tokens) for tokens in together}) == len(PROMPTS)


def test_texts_of_a_prompt_that_are_written_at_once_are_those_of_their_seed(llm: LLM) -> None:
    four = SAMPLED.model_copy(update={"n": 4})
    (output,) = llm.generate(PROMPTS[0], four)
    assert [text.index for text in output.outputs] == [0, 1, 2, 3]
    parts = list(llm.stream(PROMPTS[0], four))
    for text in output.outputs:
        mine = [part.outputs[0] for part in parts if part.outputs[0].index == text.index]
        assert [token for part in mine for token in part.token_ids] == text.token_ids
        assert mine[-1].finish_reason == "length"
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert output.outputs[0].token_ids == ids_of(llm, PROMPTS[:1], SAMPLED)[0]
    assert len({tuple(text.token_ids) for text in output.outputs}) == 4


def test_texts_that_are_left_in_the_middle_change_no_others(
    llm: LLM, alone: list[list[int]]
) -> None:
    asynchronous = AsyncLLM.of(llm.pair, llm._speculation)

    async def whole(prompt: str, params: SamplingParams) -> list[int]:
        outputs = [output async for output in asynchronous.generate(prompt, params)]
        return outputs[-1].outputs[0].token_ids

    async def main() -> list[list[int]]:
        lost = [asyncio.create_task(whole(prompt, LONG)) for prompt in PROMPTS[:2]]
        kept = [asyncio.create_task(whole(prompt, GREEDY)) for prompt in PROMPTS]
        with closing(llm.stream(PROMPTS[3], LONG)) as left:
            await asyncio.to_thread(next, left)
            for task in lost:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        return await asyncio.gather(*kept)

    assert asyncio.run(main()) == alone
    assert wait_for(lambda: marks_of(llm) == [0, 0], SOON_S)
    assert len(llm.pair.service._streams) == 0


def test_all_prompts_of_a_call_are_queued_from_its_start(llm: LLM) -> None:
    metrics = [output.outputs[0].metrics for output in llm.generate(PROMPTS * 3, GREEDY)]
    queued = [one.queued_s for one in metrics if one is not None]
    ends = [one.queued_s + one.elapsed_s for one in metrics if one is not None]
    num_seqs = llm.pair.num_seqs
    assert queued == sorted(queued), "they begin in order"
    for number, queued_s in enumerate(queued[num_seqs:], 1):
        assert queued_s >= sorted(ends)[number - 1], "one begins when one has ended"


def test_more_calls_than_the_queue_has_room_for_wait_in_order(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.cluster.service.MAX_SESSIONS", 2)
    with ThreadPoolExecutor(len(PROMPTS) * 2) as threads:
        calls = list(threads.map(lambda prompt: ids_of(llm, [prompt], GREEDY)[0], PROMPTS * 2))
    assert calls == alone * 2
    streams = [llm.pair.generate((5, 6), llm._speculation, LONG)[0] for _ in range(2)]
    with pytest.raises(NodeError, match="2 texts are queued already"):
        llm.pair.generate((5, 6), llm._speculation, LONG)
    for stream in streams:
        stream.cancel()
    assert wait_for(lambda: len(llm.pair.service._streams) == 0, SOON_S)
