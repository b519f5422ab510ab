"""How often first drafts are right is counted over the passes that had drafts."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.text.metrics import SpeculativeDecoding
from lab.measure.policy_speeds import first_drafts


def text(acceptance: dict[tuple[int, int], int]) -> Any:
    """A text's metrics; (drafted, accepted) -> number of passes."""
    return SimpleNamespace(speculative_decoding=SpeculativeDecoding.of(Counter(acceptance), 4))


def test_a_first_draft_is_right_where_any_draft_was_accepted() -> None:
    texts = [text({(4, 0): 1, (4, 2): 2}), text({(3, 3): 1}), text({})]
    assert first_drafts(texts) == pytest.approx(3 / 4)


def test_without_drafts_none_is_right() -> None:
    none: Any = SimpleNamespace(speculative_decoding=None)
    assert first_drafts([none]) == 0
