"""`allowed_token_ids` on real nodes: only these come, and the text is that of the target alone."""

from typing import Any

import pytest

from coordinator.api.config import PairConfig, SpeculationConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from coordinator.api.structured import StructuredOutputsParams
from proto.errors import ConfigurationError
from proto.messages import Role
from tests.process.reference import EVERY_POLICY, Generated, Reference, generate

pytestmark = pytest.mark.process

PROMPT = "def read_lines(path, encoding='utf-8'):\n"
NUM_TOKENS = 48
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = GREEDY.model_copy(update={"temperature": 0.9, "seed": 11})
PLAIN = SpeculationConfig(policy="ar")


@pytest.fixture(scope="module")
def ids(embedded: Pair) -> tuple[int, ...]:
    return embedded.encode(PROMPT)


@pytest.fixture(scope="module")
def allowed(embedded: Pair, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Half of the tokens, without some that the target likes best: another text comes of it."""
    free = generate(embedded, ids, PLAIN, GREEDY).tokens
    size = embedded.hello(Role.TARGET).logits_size
    return tuple(token for token in range(0, size, 2) if token not in free[::3])


def only(params: SamplingParams, allowed: tuple[int, ...], **more: Any) -> SamplingParams:
    return params.model_copy(update={"allowed_token_ids": allowed, **more})


def test_a_greedy_text_is_that_of_transformers_under_every_policy(
    embedded: Pair, ids: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    reference = Reference(PairConfig().target)
    want = reference.greedy(ids, NUM_TOKENS, prefix_allowed_tokens_fn=lambda *_: list(allowed))
    assert want != generate(embedded, ids, PLAIN, GREEDY).tokens
    num_accepted = 0
    for speculation in EVERY_POLICY:
        got = generate(embedded, ids, speculation, only(GREEDY, allowed))
        assert got.tokens == want, speculation.policy
        num_accepted += got.metrics.num_accepted_tokens
    assert num_accepted > NUM_TOKENS


@pytest.mark.long
def test_a_sampled_text_is_the_same_under_every_policy(
    embedded: Pair, ids: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    made = [
        generate(embedded, ids, speculation, only(SAMPLED, allowed, top_p=0.95))
        for speculation in EVERY_POLICY
    ]
    assert {tuple(one.tokens) for one in made} == {tuple(made[0].tokens)}
    assert set(made[0].tokens) <= set(allowed)
    assert sum(one.metrics.num_accepted_tokens for one in made) > NUM_TOKENS // 2


@pytest.mark.parametrize(
    ("params", "verify"),
    [(GREEDY, "coupled"), (SAMPLED, "coupled"), (SAMPLED, "token"), (SAMPLED, "block")],
    ids=["greedy", "sampled", "token", "block"],
)
def test_the_drafter_drafts_what_is_allowed(
    embedded: Pair, ids: tuple[int, ...], params: SamplingParams, verify: str
) -> None:
    way = SpeculationConfig(policy="sync", num_speculative_tokens=3, adaptive=False, verify=verify)
    few = (3001, 3002, 3003)  # rare ones: nobody would draft them of its own accord
    made = generate(embedded, ids, way, only(params, few))
    assert set(made.tokens) <= set(few)
    assert made.metrics.acceptance_rate > 0.3
    assert len(made.tokens) == NUM_TOKENS


@pytest.mark.parametrize("verify", ["token", "block"])
def test_the_classical_rules_write_allowed_tokens_alone(
    embedded: Pair, ids: tuple[int, ...], allowed: tuple[int, ...], verify: str
) -> None:
    way = SpeculationConfig(policy="pipelined", verify=verify)
    made = generate(embedded, ids, way, only(SAMPLED, allowed))
    assert set(made.tokens) <= set(allowed)
    assert made.metrics.num_accepted_tokens > 0


def texts_of(
    pair: Pair, ids: tuple[int, ...], params: SamplingParams
) -> tuple[Generated, Generated]:
    """The text of the target alone, and that with a drafter."""
    return generate(pair, ids, PLAIN, params), generate(
        pair, ids, SpeculationConfig(policy="tree"), params
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_biases_bans_and_penalties_choose_among_the_allowed(
    embedded: Pair, ids: tuple[int, ...], allowed: tuple[int, ...], params: SamplingParams
) -> None:
    liked, other = allowed[7], next(token for token in range(99) if token not in allowed)
    more = {"logit_bias": {liked: 4.0, other: 100.0}, "bad_words": ["self"]}
    asked = only(params, allowed, repetition_penalty=1.2, presence_penalty=0.3, **more)
    alone, drafted = texts_of(embedded, ids, asked)
    assert alone.tokens == drafted.tokens
    assert set(alone.tokens) <= set(allowed)
    assert liked in alone.tokens
    assert drafted.metrics.num_accepted_tokens > 0


def test_what_may_end_a_text_waits_for_min_tokens_unless_nothing_else_is_allowed(
    embedded: Pair, ids: tuple[int, ...], allowed: tuple[int, ...]
) -> None:
    bias = {"logit_bias": {0: 100.0}, "ignore_eos": False, "min_tokens": 9}
    alone, drafted = texts_of(embedded, ids, only(GREEDY, (*allowed, 0), **bias))
    assert alone.tokens == drafted.tokens
    assert (len(alone.tokens), alone.tokens[-1], alone.reason) == (10, 0, "stop")
    alone, drafted = texts_of(embedded, ids, only(GREEDY, (0,), **bias))
    assert alone.tokens == drafted.tokens
    assert set(alone.tokens) == {0}


def test_a_form_is_written_in_allowed_tokens(embedded: Pair, ids: tuple[int, ...]) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(regex="[a-d]{6}")
    letters = tuple(token for one in "abcz" for token in embedded.encode(one))
    asked = only(GREEDY, (*letters, 0), structured_outputs=form, ignore_eos=False)
    alone, drafted = texts_of(embedded, ids, asked)
    assert alone.tokens == drafted.tokens
    assert set(alone.tokens[:-1]) <= set(letters[:3])
    assert (len(alone.tokens), alone.tokens[-1], alone.reason) == (7, 0, "stop")
    with pytest.raises(ConfigurationError, match=r"token that ends the text .* such as 0"):
        embedded.generate(ids, PLAIN, only(asked, letters))


def test_what_cannot_be_allowed_is_refused_in_one_line(embedded: Pair) -> None:
    size = embedded.hello(Role.TARGET).logits_size
    with pytest.raises(ConfigurationError, match="allowed_token_ids: expected at least 1 of them"):
        SamplingParams(allowed_token_ids=[])
    for wrong in (-1, size):
        with pytest.raises(ConfigurationError, match="allowed_token_ids: ") as caught:
            embedded.reviewed_params(GREEDY.model_copy(update={"allowed_token_ids": (1, wrong)}))
        assert "\n" not in str(caught.value)
