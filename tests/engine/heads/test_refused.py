"""A head in the place of a whole model is refused, also where nodes are started by hand."""

import pytest

from engine.checkpoint.stated import read_stated
from engine.errors import ModelError
from engine.heads.recognised import head_kind_of
from proto.head_kinds import refuse_head
from proto.installation import MODELS


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_a_head_in_the_place_of_a_target_is_named_as_what_it_is(name: str) -> None:
    folder = str(MODELS / name)
    with pytest.raises(ModelError, match=f"^{folder} is a head of the kind {name}: it drafts for"):
        refuse_head(folder, head_kind_of(folder, None))


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_what_reads_a_whole_model_refuses_a_head_by_its_config_alone(name: str) -> None:
    with pytest.raises(ModelError, match=f"is a head of the kind {name}: it drafts for one model"):
        read_stated(name, MODELS / name)


def test_a_small_model_is_no_head() -> None:
    assert head_kind_of(str(MODELS / "drafter-shallow"), None) is None
