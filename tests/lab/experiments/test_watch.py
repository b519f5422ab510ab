"""What an experiment shows while it runs."""

import io
import re

from rich.console import Console

from lab.experiments.command import Watch
from lab.experiments.rows import Key
from lab.experiments.runner import Step


def test_long_names_leave_room_for_the_counts_on_a_terminal_of_80_columns() -> None:
    file = io.StringIO()
    with Watch(Console(file=file, width=80, force_terminal=True)) as watch:
        arm = "huggingface assisted, num_speculative_tokens=16, temperature=0.8"
        watch.say(Step(Key(arm, 0, 0, "main"), num_done=1234, num_cells=12345, left_s=6000.0))
        watch._bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "main: huggingface assisted, num_" in shown
    assert "1234/12345 about 100 min left" in shown


def test_elsewhere_it_counts_measurements() -> None:
    file = io.StringIO()
    with Watch(Console(file=file, width=80)) as watch:
        watch.say(Step(Key("ar", 0, 0, "main"), num_done=0, num_cells=24, left_s=None))
    assert file.getvalue() == "main: 0 of 24 measurements\n"
