"""Texts are the same in bfloat16 whatever is done to them: few of those of `tests.exact_texts`."""

import pytest

from proto.policies import POLICIES
from tests.exact_texts import FAMILIES, VOCAB, is_exact_family, requests_of

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize("family", FAMILIES)
def test_under_every_policy_alone_and_in_a_crowd_texts_are_those_of_plain_decoding(
    family: str,
) -> None:
    wanted = requests_of(16, VOCAB, longest=120, num_tokens=24)
    settings = {"dtype": "bfloat16", "max_num_seqs": 8, "drafter_restarts": 6}
    assert is_exact_family(family, wanted, list(POLICIES), settings)
