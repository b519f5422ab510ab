"""Each message of a text is held against the terms of that text, field by field."""

from dataclasses import replace
from typing import Any

import pytest

from proto.messages import (
    Fault,
    FaultCode,
    Features,
    Heartbeat,
    Limits,
    Logprobs,
    Lookup,
    Message,
    Open,
    PromptLogprobs,
    Proposal,
    Role,
    Rule,
    SamplingSpec,
    Welcome,
)
from proto.stopwatch import Phase
from proto.terms import MAX_US, Terms, breach_of, breach_of_node, breach_of_open
from tests.policies import pipelined
from tests.texts import draft, opening, verdict

NUM_IDS, MAX_LEN, NUM_PROMPT = 100, 20, 4
ASKED = SamplingSpec(num_logprobs=1, num_prompt_logprobs=1)
TERMS = Terms(
    NUM_IDS,
    Limits(MAX_LEN, ()),
    NUM_PROMPT,
    pipelined(8, 16),
    Rule.COUPLED,
    SamplingSpec(),
    newest=3,
    features={"float32": 8},
)
TEXT = (1, 2, 3, 4)
DRAFT, VERDICT = draft(TEXT, 5, 6), verdict(TEXT, 5, 6, num_drafted=2, num_accepted=1)
FEATURES = Features(1, 1, 6, 77, 2, "float32", bytes(16))
ROWS = Logprobs((5, 6, 7, 8), (-1.0,) * 4, (1, 100))
PROMPT = PromptLogprobs(1, 1, 2, ROWS)
CLASSICAL = replace(TERMS, rule=Rule.TOKEN)
ALL_ASKED = replace(TERMS, sampling=ASKED)
NEW_ATTEMPT = 4 << 20  # of an Open that nobody has sent


@pytest.mark.parametrize(
    ("message", "terms"),
    [
        (DRAFT, TERMS),
        (replace(DRAFT, tokens=(99, 0)), TERMS),
        (draft(range(19), 5), TERMS),
        (draft(range(20), done=True), TERMS),
        (replace(DRAFT, attempt=7, proposals=(Proposal((5,), (1.0,)),) * 2), CLASSICAL),
        (VERDICT, TERMS),
        (verdict(range(18), 5, 6), TERMS),
        (verdict(range(20)), TERMS),
        (replace(VERDICT, logprobs=ROWS), ALL_ASKED),
        (replace(VERDICT, attempt=NEW_ATTEMPT - 1), CLASSICAL),
        (FEATURES, TERMS),
        (PROMPT, ALL_ASKED),
    ],
)
def test_what_the_terms_allow_is_no_breach(message: Message, terms: Terms) -> None:
    assert breach_of(message, terms) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": (5, 100)}, "token 100: ids must be below 100"),
        ({"parent_len": 3}, "parent_len is 3: it must be in 4..20"),
        ({"parent_len": 21}, "parent_len is 21"),
        ({"parent_len": 19}, "a path's length is 21"),
        ({"first_number": 0}, "first_number is 0"),
        ({"model_us": MAX_US + 1}, "model_us is"),
        ({"num_steps": 1 << 32}, "num_steps is"),
        ({"attempt": 1}, "attempt is 1: it must be in 0..0"),
        ({"proposals": (Proposal((5,), (1.0,)),) * 2}, "proposals"),
    ],
)
def test_a_draft_keeps_to_the_vocabulary_the_length_and_the_rule(
    changes: dict[str, Any], words: str
) -> None:
    assert words in breach_of(replace(DRAFT, **changes), TERMS)


def test_a_proposal_names_tokens_of_the_vocabulary() -> None:
    proposals = (Proposal((5,), (1.0,)), Proposal((6, 100), (0.5, 0.5)))
    message = replace(DRAFT, proposals=proposals)
    assert "proposal's token 100" in breach_of(message, CLASSICAL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": (100,)}, "token 100"),
        ({"rejected": (100,)}, "rejected token 100"),
        ({"base_len": 3}, "base_len is 3"),
        ({"base_len": 21}, "base_len is 21"),
        ({"base_len": 19}, "the text's length is 21"),
        ({"num_drafted": 9}, "num_drafted is 9: it must be in 0..8"),
        ({"num_drafted": 5, "num_accepted": 3}, "num_accepted is 3: it must be in 0..2"),
        ({"num_rolled_back": 1 << 32}, "num_rolled_back"),
        ({"num_stale": 1 << 32}, "num_stale"),
        ({"wait_us": 1 << 63}, "wait_us"),
        ({"model_us": 1 << 63}, "model_us"),
        ({"host_us": 1 << 63}, "host_us"),
        ({"drafter_us": 1 << 63}, "drafter_us"),
        ({"plain_us": 1 << 63}, "plain_us"),
        ({"attempt": 1}, "attempt is 1"),
        ({"logprobs": ROWS}, "none were asked for"),
    ],
)
def test_a_verdict_keeps_to_the_vocabulary_the_length_and_the_policy(
    changes: dict[str, Any], words: str
) -> None:
    assert words in breach_of(replace(VERDICT, **changes), TERMS)


def test_an_attempt_begins_with_an_open_that_was_sent() -> None:
    assert "attempt" in breach_of(replace(VERDICT, attempt=NEW_ATTEMPT), CLASSICAL)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (Logprobs((5, 100, 7, 8), (-1.0,) * 4, (1, 1)), "a logprob's token 100"),
        (Logprobs((5, 6, 7, 8), (-1.0,) * 4, (1, 101)), "a rank is 101"),
        (Logprobs((5, 7), (-1.0,) * 2, (1, 1)), "the number of logprobs of a token is 1"),
    ],
)
def test_logprobs_are_as_many_as_were_asked_for(rows: Logprobs, words: str) -> None:
    assert words in breach_of(replace(VERDICT, logprobs=rows), ALL_ASKED)
    assert words in breach_of(replace(PROMPT, logprobs=rows), ALL_ASKED)


def test_logprobs_of_a_prompt_end_with_the_prompt_and_were_asked_for() -> None:
    assert "the end of the prompt's" in breach_of(replace(PROMPT, start=3), ALL_ASKED)
    assert "none were asked for" in breach_of(PROMPT, TERMS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, "type 'float64'"),
        ({"data": bytes(18)}, "18 bytes: they must be 2 x 8"),
        ({"num_rows": 4}, "16 bytes: they must be 4 x 8"),
        ({"end_len": 21}, "end_len is 21"),
    ],
)
def test_features_are_of_the_size_that_a_head_reads(changes: dict[str, Any], words: str) -> None:
    assert words in breach_of(replace(FEATURES, **changes), TERMS)
    assert breach_of(FEATURES, replace(TERMS, features={})), "it is no head"


@pytest.mark.parametrize(
    ("role", "message", "words"),
    [
        (Role.DRAFTER, VERDICT, "no place in what a drafter sends"),
        (Role.TARGET, DRAFT, "no place in what a target sends"),
        (Role.TARGET, Welcome(1, 1), "no place in what a target sends"),
        (Role.TARGET, Heartbeat((), 1, "", stamp_us=11), "stamp_us is 11: it must be in 0..10"),
        (Role.TARGET, Heartbeat((), 1, "", held_us=1 << 62), "held_us"),
        (Role.TARGET, Heartbeat((), 1, "", (1,)), f"it must have {len(Phase)}"),
        (Role.TARGET, Heartbeat((), 1, "", late_us=1 << 62), "late_us"),
        (Role.TARGET, Fault(1, 1, FaultCode.CLOSED, ""), "the code closed about a text"),
        (Role.TARGET, Fault(0, 0, FaultCode.GAP, ""), "the code gap about the node itself"),
    ],
)
def test_a_node_says_what_nodes_of_its_role_may_say(
    role: Role, message: Message, words: str
) -> None:
    assert words in breach_of_node(message, role, 10)


@pytest.mark.parametrize("role", list(Role))
def test_an_honest_heartbeat_and_fault_are_no_breach(role: Role) -> None:
    times = (5,) * len(Phase)
    assert not breach_of_node(Heartbeat((), 1, "ready", times, times, stamp_us=9), role, 10)
    assert not breach_of_node(Fault(1, 1, FaultCode.GAP, "another text"), role, 10)
    assert not breach_of_node(Fault(0, 0, FaultCode.FAILED, "no memory"), role, 10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_ids": 101}, "num_ids is 101"),
        ({"num_ids": 2}, "token 2: ids must be below 2"),
        ({"lookup": Lookup(1, 2, (100,))}, "the reference's token 100"),
        ({"limits": Limits(41, ())}, "max_len is 41"),
        ({"layers": (5,)}, "a layer is 5"),
    ],
)
def test_a_text_must_fit_its_target(changes: dict[str, Any], words: str) -> None:
    opened: Open = replace(opening(1, 2), num_ids=100)
    assert breach_of_open(opened, 100, 40, 5) == ""
    assert words in breach_of_open(replace(opened, **changes), 100, 40, 5)
