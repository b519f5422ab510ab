"""Real processes: a DFlash head drafts blocks for its target."""

from collections.abc import Iterator

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from coordinator.api.params import SamplingParams
from tests.dflash import FORMS, save_right
from tests.process.reference import assert_drafts_are_accepted
from tests.tiny_models import make_model

pytestmark = [pytest.mark.process, pytest.mark.long]
PROMPT, LEN = (5, 9, 33, 71), 60


@pytest.fixture(scope="module", params=["first", "second", "own"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A target that nearly always writes one token, and a head that knows it."""
    folder = tmp_path_factory.mktemp("pair")
    form = request.param if request.param in FORMS else "first"
    save_right(
        make_model("llama", folder / "llama"), folder / "target", folder / "target-dflash", form
    )
    home = "own" if request.param == "own" else ""
    config = PairConfig(target=str(folder / "target"), drafter_home=home, max_model_len=256)
    assert config.drafter == str(folder / "target-dflash"), "found beside the target"
    with Pair(config) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_drafts_are_accepted_and_the_text_is_the_targets(
    pair: Pair, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=LEN, ignore_eos=True)
    # A block takes longer than a pass of so small a target, so that most policies draft seldom, and
    # perhaps too late where both compute at once; under `sync` the target waits for the drafter.
    seldom = -1 if pair.config.drafter_home == "own" else 0
    least = {"auto": seldom, "pipelined": seldom, "sync": LEN / 2, "tree": seldom}
    assert_drafts_are_accepted(pair, PROMPT, params, least)
