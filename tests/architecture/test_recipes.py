"""What the Makefile says of tests is so."""

import re

from tests.architecture.sources import ROOT, sources


def test_every_test_that_depends_on_time_is_in_a_folder_where_they_are_looked_for() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^ALONE := (.*)$", makefile, re.MULTILINE)
    assert found is not None
    folders = [f"{folder}/" for folder in found.group(1).split()]
    mark = "pytest.mark." + "timed"
    files = [str(file.path) for file in sources("tests") if mark in file.text]
    assert len(files) > 3
    assert [path for path in files if not path.startswith(tuple(folders))] == []
    assert [
        folder for folder in folders if not any(path.startswith(folder) for path in files)
    ] == []
