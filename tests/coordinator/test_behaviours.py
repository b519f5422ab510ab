"""What users expect of a text, where no process is needed; see tests/process/test_behaviours.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from coordinator.api.outputs import Assembly
from coordinator.api.prompts import Tokenization
from coordinator.cluster.registry import Registry
from coordinator.text.detokenization import Ending
from coordinator.text.session_events import Emit
from engine.checkpoint.model import load_model
from engine.choice.classical_rules import Distribution, token_trial
from engine.choice.coupling import choose, rank_scored
from engine.choice.judging import distributions, sample_draft
from engine.choice.sampling import Sampling
from proto.messages import (
    NGRAM_SOURCE,
    PROTOCOL_VERSION,
    Fault,
    Fingerprint,
    FinishReason,
    Hello,
    Limits,
    Role,
    Welcome,
)
from tests.coordinator.text.test_stops import METRICS, dumb
from tests.tiny_models import make_model
from tests.tiny_tokenizer import save_bytewise_tokenizer


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    """A tokenizer with a token for each byte."""
    folder = tmp_path_factory.mktemp("bytewise")
    save_bytewise_tokenizer(folder)
    return Tokenization(Tokenizer.from_file(str(folder / "tokenizer.json")))


def test_1_a_stop_token_inside_the_budget_beats_the_length() -> None:
    limits = Limits(max_len=10, stop_ids=(2, 3))
    assert limits.trim(8, (7, 3, 2)) == ((7, 3), FinishReason.STOP)
    assert limits.trim(8, (7, 7, 3)) == ((7, 7), FinishReason.LENGTH)


def test_4_a_draft_leaves_room_for_the_targets_own_token() -> None:
    limits = Limits(max_len=10, stop_ids=())
    assert [limits.max_drafts(length) for length in (5, 8, 9, 10)] == [4, 1, 0, 0]


def test_6_both_sides_cut_alike_before_a_draft_is_sampled_and_what_is_sent_decided_it() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(1.0, top_k=3)
    (cut,) = distributions(logits.numpy(), sampling)
    assert len(cut.ids) == 3
    seen = set()
    for number in range(40):
        token, score, ids, weights = sample_draft(
            logits, sampling, seed=1, life=0, number=number, max_candidates=2
        )
        assert set(ids) < set(cut.ids)
        assert len(ids) == 2
        sent = Distribution.of(ids, weights)
        assert token in sent.ids
        assert score == pytest.approx(float(np.log(sent.of_token(token))))
        seen.add(token)
    assert len(seen) == 2


def test_6_no_luck_accepts_what_has_no_chance_and_without_a_rest_p_is_left() -> None:
    p = Distribution.of((1, 2), (0.5, 0.5))
    impossible = Distribution.of((3,), (1.0,))
    trial = token_trial((p, p), (3,), (impossible,))
    assert trial.num_accepted((0.0,)) == 0
    alike = token_trial((p, p), (1,), (p,))
    assert alike.following(0) is p


def test_7_equal_logits_go_to_the_lowest_id_on_both_sides() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 7:] = 1.0
    target = choose(logits, Sampling(), 1, 0, (3, 4))
    drafter, _ = rank_scored(logits, Sampling(), 1, 0, (3, 4), 1)
    assert (target, drafter) == ([7, 0], [[7], [0]])


def test_8_the_noise_is_of_the_position_and_not_of_the_rows_around_it() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    together = choose(logits, Sampling(1.0), 5, 2, (3, 4, 5, 6))
    alone = [choose(logits[i : i + 1], Sampling(1.0), 5, 2, (3 + i,))[0] for i in range(4)]
    assert together == alone


@given(
    st.text(alphabet="aé日🚲\n", max_size=12),
    st.lists(st.integers(1, 5), max_size=20),
    st.lists(st.text(alphabet="aé日\n", min_size=1, max_size=3), max_size=2),
)
def test_10_the_text_does_not_depend_on_how_many_tokens_come_at_once(
    bytewise: Tokenization, text: str, sizes: list[int], stops: list[str]
) -> None:
    tokens = bytewise.encode(text)
    ending = Ending(strings=tuple(stops))
    made = Assembly(None, (1,), 0, bytewise.stream((1,)), ending=ending)
    shown, at = "", 0
    for size in [*sizes, len(tokens)]:
        chunk = tokens[at : at + size]
        if not chunk or made.is_stopped:
            break
        shown += made.push(Emit(chunk, 0, 0, ())).outputs[0].text
        assert "\ufffd" not in shown, "half a character was shown"
        at += size
    last = made.finish("length", METRICS).outputs[0]
    want, found = dumb(text, stops, is_shown=False)
    assert (shown + last.text, last.stop_reason) == (want, found)
    assert last.finish_reason == ("stop" if found else "length")


def test_13_end_of_text_ids_come_from_generation_config_alone(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    assert load_model(str(folder)).eos_token_ids == (9, 11)


def hello(
    role: Role,
    *,
    size: int = 100,
    digest: str = "x",
    logits_size: int = 128,
    num_lanes: int = 8,
) -> Hello:
    """A node's introduction."""
    fingerprint = Fingerprint(size, digest, (2,))
    rest = (1000, "model", "float32", "cpu", 1, 1, num_lanes)
    return Hello(PROTOCOL_VERSION, role, "secret", fingerprint, logits_size, *rest)


@pytest.mark.parametrize(
    ("drafter", "answer"),
    [
        (hello(Role.DRAFTER, logits_size=112), None),
        (
            hello(Role.DRAFTER, size=99, digest="y"),
            "the drafter's vocabulary has 99 tokens, the target's 100",
        ),
        (hello(Role.DRAFTER, digest="y"), "the same ids mean different tokens"),
        (hello(Role.DRAFTER, digest=""), "the drafter has no tokenizer.json"),
    ],
)
def test_15_different_vocabularies_are_refused_padded_tails_excepted(
    drafter: Hello, answer: str | None
) -> None:
    registry = Registry("secret")
    for role in Role:
        registry.expect(role, role.value.encode(), 0.0)
    target, other = registry.of(Role.TARGET), registry.of(Role.DRAFTER)
    assert target is not None
    assert other is not None
    registry.greet(target, hello(Role.TARGET), NGRAM_SOURCE)
    said = registry.greet(other, drafter, 3)
    if answer is None:
        assert said == Welcome(100, 3)
    else:
        assert isinstance(said, Fault)
        assert answer in said.detail
        assert "choose a drafter with the target's tokenizer" in said.detail
