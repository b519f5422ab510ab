"""Logits and temperatures at the ends of their ranges: what leaves a node is always finite."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coordinator.api.params import SamplingParams
from coordinator.text.session import Session
from engine.choice.classical_rules import Distribution, token_trial
from engine.choice.coupling import choose, rank_scored, row_keys
from engine.choice.coupling_on_gpu import choose_there
from engine.choice.judging import distributions, judge, sample_draft
from engine.choice.logprobs import report
from engine.choice.processors import Processors
from engine.choice.sampling import GREEDY_BELOW, LOWEST, Sampling, process, to_host
from proto.codec import decode, encode
from proto.errors import LocalProtocolError
from proto.messages import (
    Draft,
    Logprobs,
    PromptLogprobs,
    Proposal,
    Rule,
    SamplingSpec,
)
from proto.sampling import GREEDY_BELOW as GREEDY_BELOW_ON_THE_WIRE
from tests.policies import synchronous
from tests.proto.test_codec import DRAFT, LIMITS, OPEN

VOCAB = 12
LARGEST = float(np.finfo(np.float32).max)
SEED, POSITION = 11, 5

# Usual ones, the largest there are, and tokens that are ruled out; at least one stays.
a_logit = st.one_of(
    st.floats(-50, 50, width=32),
    st.floats(-LARGEST, LARGEST, width=32),
    st.sampled_from([LARGEST, -LARGEST, 1e30, 1e34, -1e34, 0.0, -math.inf]),
)
some_rows = (
    arrays(np.float32, (1, VOCAB), elements=a_logit)
    .filter(lambda row: np.isfinite(row).any())
    .map(torch.from_numpy)
)
tiny_temperatures = st.floats(0.0, GREEDY_BELOW, exclude_max=True)
temperatures = st.one_of(
    st.sampled_from([GREEDY_BELOW, 1.1e-5, 1e-3, 1.0, 100.0]), st.floats(1e-5, 100)
)
cuts = st.sampled_from(
    [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}]
)


def sent(draft: Draft) -> Draft:
    """As it arrives; fails if the protocol does not allow it."""
    there = decode(encode(draft))
    assert isinstance(there, Draft)
    return there


def draft_of(token: int, score: float, proposals: tuple[Proposal, ...] = ()) -> Draft:
    """A draft of one token."""
    return replace(DRAFT, tokens=(token,), parents=(-1,), scores=(score,), proposals=proposals)


@given(logits=some_rows, temperature=tiny_temperatures, cut=cuts)
def test_a_tiny_temperature_chooses_the_likeliest_token(
    logits: torch.Tensor, temperature: float, cut: dict[str, float]
) -> None:
    sampling = Sampling(temperature, **cut)  # type: ignore[arg-type]
    assert sampling.is_greedy
    best = [int(logits[0].argmax())]
    keys = row_keys(SEED, 0, (POSITION,))
    assert choose(logits, sampling, SEED, 0, (POSITION,)) == best
    assert rank_scored(logits, sampling, SEED, 0, (POSITION,), 1)[0] == [best]
    assert choose_there(logits, sampling, keys)()[0] == best
    assert process(logits, sampling)[0].isfinite().nonzero().tolist() == [best]


@given(logits=some_rows, temperature=st.one_of(tiny_temperatures, temperatures), cut=cuts)
def test_a_draft_of_any_logits_is_what_the_protocol_allows(
    logits: torch.Tensor, temperature: float, cut: dict[str, float]
) -> None:
    sampling = Sampling(temperature, **cut)  # type: ignore[arg-type]
    ((token,),), ((score,),) = rank_scored(logits, sampling, SEED, 0, (POSITION,), 1)
    sent(draft_of(token, score))
    ids, scores = rank_scored(logits, sampling, SEED, 0, (POSITION,), VOCAB)
    assert ids[0][0] == token
    for score in scores[0]:
        sent(draft_of(token, score))
    keys = row_keys(SEED, 0, (POSITION,))
    (there,), (score,) = choose_there(logits, sampling, keys, beta=1.5)()
    assert there == token
    sent(draft_of(there, score))


@given(logits=some_rows, temperature=temperatures, cut=cuts)
def test_a_sampled_draft_of_any_logits_is_sent_and_judged(
    logits: torch.Tensor, temperature: float, cut: dict[str, float]
) -> None:
    sampling = Sampling(temperature, **cut)  # type: ignore[arg-type]
    token, score, ids, weights = sample_draft(logits, sampling, seed=SEED, life=0, number=1)
    proposal = Proposal(tuple(ids.tolist()), tuple(weights.tolist()))
    arrived = sent(draft_of(token, score, (proposal,))).proposals[0]
    (whole,) = distributions(to_host(logits), sampling)
    assert whole.probs.sum() == pytest.approx(1.0)
    q = Distribution.of(arrived.ids, arrived.probs)
    rows = torch.cat((logits, logits))
    num_accepted, tokens = judge(
        rows, sampling, token_trial, [token], [q], seed=SEED, life=0, number=2
    )
    assert tokens[:num_accepted] == (token,)[:num_accepted]
    assert math.isfinite(float(logits[0, tokens[-1]]))


@given(logits=some_rows, token=st.integers(0, VOCAB - 1))
def test_logprobs_of_any_logits_are_finite(logits: torch.Tensor, token: int) -> None:
    reported = report(logits, (token,), 5)
    assert all(LOWEST <= value <= 0.0 for value in reported.values)
    rows = Logprobs(reported.ids, reported.values, reported.ranks)
    assert decode(encode(PromptLogprobs(1, 1, 1, rows)))


@given(logits=some_rows, penalty=st.sampled_from([1e-3, 0.5, 2.0, 1e3]))
def test_a_penalty_never_makes_a_logit_infinite(logits: torch.Tensor, penalty: float) -> None:
    spec = SamplingSpec(repetition_penalty=penalty)
    changed = Processors(spec, list(range(VOCAB)), 4, VOCAB).apply(logits, [(1, 2)])
    assert changed.max().isfinite()


def test_logits_far_from_zero_are_told_apart_at_the_lowest_temperature() -> None:
    row = torch.tensor([[1e34, 3e34, 2e34], [-3e38, -2e38, -1e38], [1e38, -3e38, 3e38]])
    sampling = Sampling(GREEDY_BELOW)
    assert choose(row, sampling, SEED, 0, range(3)) == [1, 2, 2]
    assert choose_there(row, sampling, row_keys(SEED, 0, range(3)))()[0] == [1, 2, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 9.9e-6])
def test_a_request_below_the_limit_is_greedy_and_says_so(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    assert params.temperature == 0.0
    assert SamplingParams(temperature=GREEDY_BELOW).temperature == GREEDY_BELOW
    assert GREEDY_BELOW == GREEDY_BELOW_ON_THE_WIRE


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_greedy_text_is_not_judged_by_a_ratio(rule: Rule) -> None:
    greedy = replace(OPEN, rule=rule, sampling=SamplingSpec(temperature=1e-40))
    with pytest.raises(LocalProtocolError, match="a greedy text"):
        encode(greedy)
    assert decode(encode(replace(greedy, sampling=SamplingSpec(temperature=GREEDY_BELOW))))
    for temperature, its_rule in ((1e-40, Rule.COUPLED), (GREEDY_BELOW, rule)):
        session = Session(
            1,
            bytes(16),
            (5, 6),
            sampling=SamplingSpec(temperature=temperature),
            policy=synchronous(4),
            limits=LIMITS,
            rule=rule,
        )
        assert session.rule is its_rule
