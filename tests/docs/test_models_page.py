"""docs/models.md says what the table of families says, which refuses models and is tested."""

import re

from engine.checkpoint.families import CAUSAL, WRAPPERS, family
from lab.pictures import models

ITEMS = re.MULTILINE | re.DOTALL


def test_the_page_of_models_says_what_the_table_says_today() -> None:
    assert models.page() == models.PAGE.read_text("utf-8"), "run `python -m lab.pictures.models`"


def test_the_page_has_each_family_in_the_table_or_behind_the_reason_why_it_is_refused() -> None:
    runs, refused = models.page().split("## What is refused")
    runs, wrappers = runs.split("## Models of several modalities")
    alone = CAUSAL - set(WRAPPERS)
    behind = {
        kind: reason
        for reason, kinds in re.findall(r"^\* \*\*(.*?)\*\*:(.*?)$(?=\n\*|\n\Z)", refused, ITEMS)
        for kind in kinds.replace(",", " ").split()
    }
    assert behind == {kind: why for kind in alone if (why := family(kind).refused) is not None}
    in_table = re.findall(r"^\| ([a-z0-9_-]+) \|", runs, re.MULTILINE)
    assert sorted(in_table) == sorted(alone - set(behind))
    rows = re.findall(r"^\| ([a-z0-9_]+) \| ([a-z0-9_]+) \|", wrappers, re.MULTILINE)
    assert dict(rows) == dict(WRAPPERS)
