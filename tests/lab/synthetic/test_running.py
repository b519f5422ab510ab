"""The synthetic pair as it is started: real processes write what the target alone would."""

import json
from pathlib import Path

import pytest

from coordinator.api.params import SamplingParams
from lab.synthetic.__main__ import Either, main, measured, with_best_k
from lab.synthetic.host_time import Launch
from lab.synthetic.one_process import started_in_one_process
from lab.synthetic.running import Costs, started
from lab.synthetic.shared_device import STRETCH, SharedDevice, Sharing
from lab.synthetic.summary import Made, Summary, median_interval, summarised, table
from proto.messages import Role

LAUNCH = Launch(1.0, 1.0002, 1.005)


@pytest.mark.process
def test_every_policy_writes_what_the_target_alone_would_and_is_measured() -> None:
    policies = ("ar", "sync:3", "sync, one process:3", "tree", "tree, at home", "sync, at home:3")
    costs = Costs(2.0, 1.0)
    with (
        started_in_one_process(costs) as one,
        started(costs, at_home=True) as home,
        started(costs) as pair,
    ):
        both = Either(pair, one, home)
        sampled = measured(both, policies, num_texts=1, num_tokens=40, temperature=0.7)
        greedy = measured(both, policies, num_texts=1, num_tokens=40, temperature=0.0)
    assert {one.policy for one in sampled} == set(policies)
    plain, sync, one_loop, tree, home_tree, home_sync = summarised(greedy)
    assert home_tree.tokens_per_pass > 1 < home_sync.tokens_per_pass
    assert plain.tokens_per_pass == 1 < sync.tokens_per_pass
    assert one_loop.tokens_per_pass > 1
    assert set(one_loop.critical_us) == {"one process"}
    assert set(plain.critical_us) == {"target"}
    assert set(tree.critical_us) == {"drafter", "target"}
    assert all(spread.p90 >= spread.median >= 0 for spread in tree.critical_us.values())
    assert all(share > 0 for share in tree.cores.values())
    json.dumps(tree.as_json())
    assert any("tree" in line for line in table([plain, sync, one_loop, tree]))


@pytest.mark.process
@pytest.mark.timed
@pytest.mark.parametrize("sharing", ["turns", "both"])
def test_two_processes_that_share_a_device_write_the_same(sharing: Sharing) -> None:
    with started(Costs(2.0, 1.0), sharing=sharing) as pair:
        made = measured(pair, ("sync:3", "tree"), num_texts=2, num_tokens=60, temperature=0.7)
    assert [one.num_tokens for one in made] == [60] * 4


def test_on_a_shared_device_one_waits_for_the_other_or_is_stretched(tmp_path: Path) -> None:
    def devices(sharing: Sharing) -> tuple[SharedDevice, SharedDevice]:
        path = tmp_path / sharing
        return (
            SharedDevice(0.010, 0.0, path=path, role=Role.TARGET, sharing=sharing),
            SharedDevice(0.002, 0.0, path=path, role=Role.DRAFTER, sharing=sharing),
        )

    target, drafter = devices("turns")
    assert target.end_of(1.0, 1)[0] == pytest.approx(1.010)
    assert drafter.end_of(1.001, 1)[0] == pytest.approx(1.012), "it waits for the pass"
    assert target.end_of(1.010, 1)[0] == pytest.approx(1.022), "and the pass for it"
    target, drafter = devices("both")
    assert target.end_of(1.0, 1)[0] == pytest.approx(1.010)
    assert drafter.end_of(1.009, 1)[0] == pytest.approx(1.011)
    assert target.end_of(1.010, 1)[0] == pytest.approx(1.020 + 0.001 * (1 - 1 / STRETCH))


def test_a_policy_that_never_has_a_draft_accepted_is_not_measured() -> None:
    pair = OneFast(num_accepted=0)
    with pytest.raises(AssertionError, match="no draft was accepted"):
        measured(pair, ["tree"], num_texts=2, num_tokens=10, temperature=0.0)
    measured(pair, ["ar"], num_texts=2, num_tokens=10, temperature=0.0)


def test_the_best_k_is_the_fastest_of_the_pilot_texts() -> None:
    assert with_best_k(OneFast(), "sync:best", 10, 0.0) == "sync:5"
    assert with_best_k(OneFast(), "tree:16", 10, 0.0) == "tree:16"


class OneFast:
    """A pair that is fastest with K = 5."""

    def __init__(self, num_accepted: int = 5) -> None:
        self.num_accepted = num_accepted

    def write(self, policy: str, prompt: tuple[int, ...], request: SamplingParams) -> Made:
        speed = 2.0 if policy == "sync:5" else 1.0
        return Made(policy, 10, 1.0, speed, 5, self.num_accepted, 0.0, {}, {})


@pytest.mark.parametrize("name", ["three", "tree, one process", "pearl, one process:best"])
def test_a_policy_that_is_none_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main([f"--policy={name}"]) == 1
    assert name.partition(",")[0] in capsys.readouterr().err


def test_the_interval_of_a_median_has_the_values_that_the_sign_test_says() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([float(value) for value in range(8)]) == (0.0, 7.0)
    assert median_interval([float(value) for value in range(9)]) == (1.0, 7.0)


def summary_of(speeds: list[float], late_share: float) -> Summary:
    texts = [
        Made("tree", 10, 1.0, speed, 5, 5, late_share, {"target": 0.1}, {"target": [LAUNCH]})
        for speed in speeds
    ]
    (found,) = summarised(texts)
    return found


def test_a_figure_is_void_if_lost_time_would_take_it_out_of_its_interval() -> None:
    wide, narrow = [1.5, 1.6, 1.7, 1.8, 1.9, 2.0], [1.70, 1.71, 1.69, 1.70, 1.70, 1.70]
    assert not summary_of(wide, 0.03).is_void
    assert summary_of(narrow, 0.03).is_void
    assert not summary_of(narrow, 0.009).is_void
    assert summary_of(wide, 0.06).is_void
    assert summary_of(wide, 0.03).speed_in_time is None
    assert summary_of(wide, 0.03).undisturbed == pytest.approx(1.75 / 0.97)
