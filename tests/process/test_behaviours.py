"""What users expect of a text, on real processes: a test for each behaviour, named after it.

Behaviours of verification rules are in test_rules.py; those that need no process in
tests/coordinator/test_behaviours.py.
"""

import time
from collections.abc import Iterator

import pytest
import torch

from coordinator.api.config import (
    SpeculationConfig,
)
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from proto.messages import Role
from tests.engine.choice.test_processors import Shape, dumb
from tests.process.behaviours import (
    AR,
    CONFIG,
    MAX_MODEL_LEN,
    PIPELINED,
    POLICIES,
    PROMPT,
    SYNC,
    answered,
    checked_text,
    logits_of,
    num_accepted,
    steps_of,
)
from tests.process.reference import NEAR_TIE, Reference

pytestmark = pytest.mark.process

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=11, max_tokens=40, ignore_eos=True)
SOON_S = 3.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """One pair for all of them.

    Its passes take as long as those of a larger target: else a text of a few tokens may be over
    before the first draft comes, and nothing is accepted in it.
    """
    with Pair(CONFIG.model_copy(update={"simulate_target_ms": 5.0})) as started:
        yield started


@pytest.fixture(scope="module")
def target() -> Reference:
    """The target's model in this process."""
    return Reference(CONFIG.target)


def with_(params: SamplingParams, **changes: object) -> SamplingParams:
    """The same with changes, checked."""
    return SamplingParams(**{**params.model_dump(), **changes})


@pytest.fixture(scope="module")
def text(pair: Pair) -> list[int]:
    """Forty tokens of SAMPLED."""
    return answered(pair, SAMPLED).outputs[0].token_ids


@pytest.fixture(scope="module")
def eos(pair: Pair) -> int:
    """The end-of-text token."""
    return pair.hello(Role.TARGET).fingerprint.eos_ids[0]


# -- 1: what ends a text ------------------------------------------------------------------------


def test_1_a_stop_token_wins_over_the_length_that_ends_at_the_same_token(
    pair: Pair, text: list[int]
) -> None:
    last = max(range(10, 30), key=lambda i: (text[i] not in text[:i], i))
    params = with_(SAMPLED, stop_token_ids=[text[last]])
    for max_tokens in (last + 1, 40):
        made = checked_text(pair, with_(params, max_tokens=max_tokens))
        assert made.token_ids == text[: last + 1]
        assert (made.finish_reason, made.stop_reason) == ("stop", text[last])
    made = checked_text(pair, with_(params, max_tokens=last))
    assert (made.finish_reason, made.stop_reason) == ("length", None)


def test_1_no_bonus_token_follows_an_accepted_end_of_text(pair: Pair, eos: int) -> None:
    params = with_(SAMPLED, ignore_eos=False, min_tokens=6, logit_bias={eos: 100})
    made = checked_text(pair, params)
    assert len(made.token_ids) == 7
    assert made.token_ids[-1] == eos
    assert made.token_ids.index(eos) == 6
    assert (made.finish_reason, made.stop_reason) == ("stop", None)
    assert made.token_origins[-1] == "draft:model"


def test_1_ignore_eos_goes_on_and_stop_tokens_still_count(pair: Pair, eos: int) -> None:
    params = with_(SAMPLED, max_tokens=9, logit_bias={eos: 100})
    made = checked_text(pair, params)
    assert (made.token_ids, made.finish_reason) == ([eos] * 9, "length")
    made = checked_text(pair, with_(params, stop_token_ids=[eos], min_tokens=4))
    assert len(made.token_ids) == 5
    assert (made.finish_reason, made.stop_reason) == ("stop", eos)


def test_1_several_end_of_text_ids_and_min_tokens(pair: Pair, text: list[int]) -> None:
    ends = [text[20], text[12]]
    first = min(text.index(end) for end in ends)
    made = checked_text(pair, with_(SAMPLED, stop_token_ids=ends))
    assert made.token_ids == text[: first + 1]
    made = checked_text(pair, with_(SAMPLED, stop_token_ids=ends, min_tokens=first + 5))
    assert len(made.token_ids) >= first + 6 or made.finish_reason == "length"
    assert not set(made.token_ids[: first + 5]) & set(ends)


def test_1_the_earlier_of_stop_string_and_stop_token_wins(pair: Pair, text: list[int]) -> None:
    assert pair.tokenization is not None
    whole = pair.tokenization.decode(tuple(text))
    early, late = whole[8:12], whole[20:25]
    for strings in ([early, late], [late, early]):
        made = checked_text(pair, with_(SAMPLED, stop=strings, stop_token_ids=[text[-1]]))
        assert made.stop_reason == early
        assert made.text == whole[: whole.index(early)]


# -- 2, 3, 4: counting and trimming -------------------------------------------------------------


def test_2_usage_and_acceptance_count_only_what_is_in_the_text(pair: Pair, text: list[int]) -> None:
    assert pair.tokenization is not None
    whole = pair.tokenization.decode(tuple(text))
    for policy in POLICIES:
        made = answered(pair, with_(SAMPLED, stop=whole[14:18]), policy).outputs[0]
        metrics = made.metrics
        assert metrics is not None
        assert made.finish_reason == "stop"
        assert metrics.num_tokens == len(made.token_ids) < 40
        assert num_accepted(made) <= metrics.num_draft_tokens
        own = len(made.token_ids) - metrics.num_accepted_tokens
        assert metrics.num_target_passes - 1 <= own <= metrics.num_target_passes
        assert (metrics.num_accepted_tokens > 0) == (policy is not AR)


@pytest.mark.parametrize("is_shown", ["", "shown"])
def test_3_everything_is_trimmed_at_the_stop(pair: Pair, text: list[int], is_shown: str) -> None:
    assert pair.tokenization is not None
    whole = pair.tokenization.decode(tuple(text))
    stop = whole[13:18]
    end = whole.index(stop)
    params = with_(SAMPLED, stop=stop, logprobs=1, include_stop_str_in_output=bool(is_shown))
    made = checked_text(pair, params)
    assert made.text == whole[: end + len(stop) if is_shown else end]
    count = len(made.token_ids)
    assert made.token_ids == text[:count]
    assert made.logprobs is not None
    assert len(made.logprobs) == len(made.token_origins) == count
    assert stop in pair.tokenization.decode(tuple(text[:count]))
    assert stop not in pair.tokenization.decode(tuple(text[: count - 1]))


def test_4_nothing_is_drafted_past_max_tokens_or_the_context(pair: Pair) -> None:
    eight = SpeculationConfig(policy="sync", num_speculative_tokens=8, adaptive=False)
    long = PROMPT * (MAX_MODEL_LEN // len(pair.encode(PROMPT)) + 1)
    ids = pair.encode(long)[: MAX_MODEL_LEN - 6]
    for prompt, params in ((pair.encode(PROMPT), with_(GREEDY, max_tokens=6)), (ids, GREEDY)):
        stream, _ = pair.generate(prompt, eight, params)
        assert sum(len(emit.tokens) for emit in stream) == 6
        assert stream.result is not None
        figures = stream.result.metrics.speculative_decoding
        assert figures is not None
        assert figures.num_accepted_draft_tokens > 0
        drafted = figures.acceptance_histogram_by_draft_length
        assert max(drafted) <= 5, "more drafts than there is room before the target's own token"


# -- 5, 7, 9, 14: logits and what is reported of them ---------------------------------------------


def shape_of(params: SamplingParams, pair: Pair, eos: int) -> Shape:
    """The settings as the dumb version of the processors reads them."""
    assert pair.tokenization is not None
    return Shape(
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        tuple(params.logit_bias),
        tuple(params.logit_bias.values()),
        pair.tokenization.bans(params.bad_words),
        params.min_tokens,
        (eos, *params.stop_token_ids),
    )


def test_5_processors_see_the_prompt_the_text_and_the_drafts_before_each_token(
    pair: Pair, target: Reference, text: list[int], eos: int
) -> None:
    params = with_(
        GREEDY,
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={text[3]: 1.5, text[5]: -3.0},
        bad_words=["self", "encoding"],
        min_tokens=30,
        stop_token_ids=[text[7]],
        logprobs=0,
    )
    made = checked_text(pair, params)
    prompt = list(pair.encode(PROMPT))
    raw = logits_of(target, [*prompt, *made.token_ids])[len(prompt) - 1 : -1]
    shape = shape_of(params, pair, eos)
    for place, token in enumerate(made.token_ids):
        row = torch.tensor(dumb(shape, prompt, made.token_ids[:place], raw[place].numpy()))
        assert float(row.max() - row[token]) < NEAR_TIE, f"token {place} is not the likeliest"
    # What is reported is raw all the same.
    assert made.logprobs is not None
    want = torch.log_softmax(raw, dim=1)
    got = [row[token].logprob for row, token in zip(made.logprobs, made.token_ids, strict=True)]
    assert got == pytest.approx(
        [float(want[i, token]) for i, token in enumerate(made.token_ids)], abs=1e-3
    )
    assert answered(pair, GREEDY).outputs[0].token_ids != made.token_ids


def test_7_greedy_is_the_argmax_of_the_target(pair: Pair, target: Reference) -> None:
    made = checked_text(pair, GREEDY)
    prompt = list(pair.encode(PROMPT))
    logits = logits_of(target, [*prompt, *made.token_ids])[len(prompt) - 1 : -1]
    for row, token in zip(logits, made.token_ids, strict=True):
        best = row.topk(2).values
        assert int(row.argmax()) == token or float(best[0] - best[1]) < NEAR_TIE


def test_8_the_seed_alone_decides_whatever_the_draft_length(pair: Pair, text: list[int]) -> None:
    for k in (1, 3, 8):
        policy = SpeculationConfig(policy="sync", num_speculative_tokens=k, adaptive=False)
        made = answered(pair, SAMPLED, policy).outputs[0]
        assert made.token_ids == text
        assert num_accepted(made) > 0
    assert answered(pair, with_(SAMPLED, seed=12)).outputs[0].token_ids != text


BY_RATIO = SpeculationConfig(policy="sync", verify="block", adaptive=False)


@pytest.mark.parametrize("policy", [*POLICIES, BY_RATIO], ids=lambda p: p.policy + p.verify)
def test_9_logprobs_are_right_for_tokens_of_every_origin(
    pair: Pair, target: Reference, policy: SpeculationConfig
) -> None:
    output = answered(pair, with_(SAMPLED, logprobs=3, prompt_logprobs=2), policy)
    made, prompt = output.outputs[0], output.prompt_token_ids
    assert (num_accepted(made) > 0) == (policy is not AR)
    assert policy.policy != "sync" or {"draft:model", "recovered", "bonus"} <= set(
        made.token_origins
    )
    want = torch.log_softmax(logits_of(target, [*prompt, *made.token_ids]), dim=1)
    assert made.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    rows = [row for row in (*output.prompt_logprobs, *made.logprobs) if row is not None]
    for place, (row, token) in enumerate(zip(rows, [*prompt, *made.token_ids][1:], strict=True)):
        num_top = 2 if place < len(prompt) - 1 else 3
        assert next(iter(row)) == token
        assert row[token].rank == 1 + int((want[place] > want[place, token]).sum())
        best = sorted(row.values(), key=lambda entry: entry.rank)[:num_top]
        assert [entry.rank for entry in best] == list(range(1, num_top + 1))
        for other, entry in row.items():
            assert entry.logprob == pytest.approx(float(want[place, other]), abs=1e-3)
    total = sum(
        row[token].logprob for row, token in zip(made.logprobs, made.token_ids, strict=True)
    )
    assert made.cumulative_logprob == pytest.approx(total)


def test_14_min_p_and_logit_bias_work_under_speculation(pair: Pair, text: list[int]) -> None:
    for changes in ({"min_p": 0.1}, {"logit_bias": {text[0]: -100, text[1]: 3.0}}):
        made = checked_text(pair, with_(SAMPLED, **changes))
        assert made.token_ids != text
        assert num_accepted(made) > 0


# -- 10, 11, 12, 13: streams, chats and several texts ---------------------------------------------


def test_10_a_stream_never_takes_text_back(pair: Pair, text: list[int]) -> None:
    assert pair.tokenization is not None
    whole = pair.tokenization.decode(tuple(text))
    stop = whole[20:23]
    params = with_(SAMPLED, stop=[stop, "never written"])
    for policy in POLICIES:
        steps = list(steps_of(pair, params, policy))
        shown = ""
        for step in steps:
            shown += step.part.outputs[0].text
            assert whole[: whole.index(stop)].startswith(shown), "a stop string was let through"
        assert shown == whole[: whole.index(stop)]
        assert [step.part.finished for step in steps] == [False] * (len(steps) - 1) + [True]
        last = steps[-1].part.outputs[0]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        assert last.metrics is not None
        assert last.metrics.num_tokens == sum(len(s.part.outputs[0].token_ids) for s in steps)


def test_10_a_character_is_shown_when_all_of_its_bytes_have_come(pair: Pair) -> None:
    assert pair.tokenization is not None
    ids = pair.tokenization.encode("日本", special_tokens=False)
    assert len(ids) > 2, "a character is one token"
    bias = dict.fromkeys(ids, 60.0)
    params = with_(SAMPLED, logit_bias=bias, temperature=1.0, repetition_penalty=1.2)
    steps = list(steps_of(pair, params, PIPELINED))
    parts = [step.part.outputs[0].text for step in steps]
    tokens = tuple(t for step in steps for t in step.part.outputs[0].token_ids)
    assert "".join(parts) == pair.tokenization.decode(tokens)
    assert any(step.emit is not None and step.emit.num_accepted for step in steps)


def test_11_a_chat_follows_the_template_of_the_targets_tokenizer(pair: Pair) -> None:
    prompt, ids = pair.encode_chat([{"role": "user", "content": "read a file"}])
    assert prompt == "User: read a file\n\nAssistant:"
    assert ids == pair.encode(prompt)
    stream, _ = pair.generate(ids, SYNC, GREEDY)
    assert sum(emit.num_accepted for emit in stream) > 0, "the drafter was told other ids"


def test_12_a_client_that_leaves_closes_its_text_on_both_nodes(pair: Pair, text: list[int]) -> None:
    steps = steps_of(pair, with_(GREEDY, max_tokens=MAX_MODEL_LEN))
    next(steps)
    steps.close()
    nodes = [pair.service.registry.of(role) for role in (Role.TARGET, Role.DRAFTER)]
    deadline = time.monotonic() + SOON_S
    while any(node is None or node.marks for node in nodes) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(node is not None and node.marks == () for node in nodes)
    made = answered(pair, SAMPLED).outputs[0]
    assert made.token_ids == text
    assert num_accepted(made) > 0


@pytest.mark.timed
def test_12_a_stop_string_frees_the_nodes_for_the_next_text(pair: Pair, text: list[int]) -> None:
    assert pair.tokenization is not None
    whole = pair.tokenization.decode(tuple(text))
    long = with_(SAMPLED, stop=whole[10:14], max_tokens=MAX_MODEL_LEN)
    for policy in (SYNC, PIPELINED):
        assert answered(pair, long, policy).outputs[0].finish_reason == "stop"
        after = answered(pair, SAMPLED, policy).outputs[0]
        assert after.token_ids == text
        assert after.metrics is not None
        assert after.metrics.queued_s < 0.5
        assert num_accepted(after) > 0


def test_13_several_texts_of_a_prompt_are_independent(pair: Pair, text: list[int]) -> None:
    outputs = [answered(pair, with_(SAMPLED, n=3), policy).outputs for policy in (AR, PIPELINED)]
    ids = [[made.token_ids for made in made_by] for made_by in outputs]
    assert ids[0] == ids[1]
    assert ids[0][0] == text
    assert len({tuple(made) for made in ids[0]}) == 3
    assert [made.index for made in outputs[1]] == [0, 1, 2]
    assert all(num_accepted(made) > 0 for made in outputs[1])


def test_13_a_request_may_opt_out_of_speculation(pair: Pair, text: list[int]) -> None:
    made = answered(pair, SAMPLED, AR).outputs[0]
    assert made.token_ids == text
    assert set(made.token_origins) == {"plain"}
    opted_out = SAMPLED.model_copy(update={"speculate": False})
    made = answered(pair, opted_out, PIPELINED).outputs[0]
    assert made.token_ids == text
    assert set(made.token_origins) == {"plain"}
    assert num_accepted(answered(pair, SAMPLED, PIPELINED).outputs[0]) > 0
