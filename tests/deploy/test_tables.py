"""The benchmark's table: what is void is not shown, nor what is compared with it."""

from dataclasses import replace

from coordinator.text.counts import SessionCounts
from coordinator.text.metrics import Metrics
from coordinator.text.simulated import Simulated
from deploy.experiments.arms import Arm, Run, Text, best_arm
from deploy.experiments.tables import swept, table

DEVICE = Simulated(30.0, 0.0, 0.0, 0.0, (), 0, num_forwards=100)


def text(num_overruns: int, tokens_per_second: float = 40.0) -> Text:
    """Of a hundred forwards, so many that took too long."""
    metrics = Metrics.of(
        SessionCounts(num_passes=3, num_drafted=4, num_accepted=1),
        started=0.0,
        emitted=[(0.1, 4)],
        drafter_lost_at=None,
        queued_s=0.0,
        num_spec_tokens=0,
    )
    simulated = replace(DEVICE, num_overruns=num_overruns)
    return Text((1, 2), tokens_per_second, 0.1, 1.0, 2.0, replace(metrics, simulated=simulated))


def rows(**num_overruns: int) -> dict[str, list[str]]:
    """The words of each line of a table of ar and sync, by its arm."""
    runs = [
        Run(arm, prompt, 0, 0.0, text(number))
        for arm, number in num_overruns.items()
        for prompt in (0, 1)
    ]
    lines = table(runs, list(num_overruns), plain="ar", sync="sync").splitlines()[2:]
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_an_arm_with_more_than_one_overrun_in_a_hundred_forwards_is_void() -> None:
    found = rows(ar=1, sync=2)
    assert found["sync"] == [
        "void",
        "2%",
        "of",
        "the",
        "forwards",
        "took",
        "longer",
        "than",
        "simulated",
    ]
    assert found["ar"][:4] == ["40", "1.00", "(1.00-1.00)", "void"]
    found = rows(ar=50, sync=0, pipelined=0)
    assert found["ar"][:2] == ["void", "50%"]
    assert found["pipelined"][:3] == ["40", "void", "1.00"]


def test_a_setting_that_is_void_is_not_the_fastest() -> None:
    made = {"late": text(5, 90.0), "good": text(0, 30.0)}
    arms = [Arm(name, lambda *_, name=name: made[name]) for name in made]
    best, speeds = best_arm(arms, [(1,)], temperature=0.0, say=lambda _: None)
    assert best.name == "good"
    assert swept(speeds) == "swept: late void, good 30"
