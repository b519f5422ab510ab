"""How the code must look, where no tool checks it."""

from collections.abc import Callable

import pytest

from tests.architecture import style
from tests.architecture.sources import PACKAGES, Source, source, sources

Check = Callable[[Source], list[str]]

EVERYWHERE: tuple[Check, ...] = (
    style.long_functions,
    style.long_file,
    style.long_lines,
    style.leftovers,
)
IN_TESTS: tuple[Check, ...] = (
    style.names_that_are_no_sentences,
    style.tests_without_an_assertion,
)
LONG_FUNCTION = "def long():\n" + "    pass\n" * style.MAX_FUNCTION_LINES


def by_name(check: Check) -> str:
    """How a check is called in a test's name."""
    return check.__name__


@pytest.mark.parametrize("check", EVERYWHERE, ids=by_name)
def test_every_file_is_as_the_style_says(check: Check) -> None:
    assert [line for file in sources(*PACKAGES, "tests") for line in check(file)] == []


@pytest.mark.parametrize("check", IN_TESTS, ids=by_name)
def test_every_test_is_a_sentence_with_an_assertion(check: Check) -> None:
    files = [file for file in sources("tests") if file.path.name.startswith("test_")]
    assert [line for file in files for line in check(file)] == []


def test_only_a_process_who_starts_one_and_who_runs_the_code_of_heads_catches_everything() -> None:
    found = {file.path.as_posix() for file in sources(*PACKAGES) if style.broad_excepts(file)}
    assert found == {"coordinator/cluster/service.py", "target_node/home_worker.py"}


def test_no_message_is_longer_than_a_line() -> None:
    found = [line for file in sources(*PACKAGES) for line in style.long_messages(file)]
    assert found == []


def test_nobody_asks_for_the_name_of_a_policy() -> None:
    found = [line for file in sources(*PACKAGES) for line in style.asks_for_a_policy(file)]
    assert found == []


def test_the_codec_never_asserts_what_a_peer_has_sent() -> None:
    names = {"codec.py", "consistency.py", "fields.py"}
    files = [file for file in sources("proto") if file.path.name in names]
    found = {function.name for file in files for function in style.functions(file)}
    readers = found & style.READERS
    assert readers == style.READERS
    assert [line for file in files for line in style.asserts_on_input(file)] == []


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (style.long_functions, "proto/tree.py", LONG_FUNCTION),
        (style.long_functions, "proto/tree.py", LONG_FUNCTION.replace("def", "async def")),
        (style.long_file, "proto/tree.py", "x = 1\n" * (style.MAX_FILE_LINES + 1)),
        (style.long_lines, "proto/tree.py", "x = '" + "x" * style.MAX_COLUMNS + "'"),
        (style.long_messages, "proto/tree.py", f"raise NodeError('{'so ' * 34}')"),
        (style.long_messages, "proto/tree.py", f"raise NodeError(f'{{x}} ' 'is {'so ' * 32}')"),
        (style.leftovers, "proto/tree.py", "x = 1  # TO" + "DO: two"),
        (style.leftovers, "proto/tree.py", "break" + "point()"),
        (style.broad_excepts, "proto/tree.py", "try:\n    x = 1\nexcept:\n    x = 2"),
        (style.broad_excepts, "proto/tree.py", "try:\n    x = 1\nexcept Exception:\n    x = 2"),
        (
            style.broad_excepts,
            "proto/tree.py",
            "try:\n    x = 1\nexcept (ValueError, BaseException) as error:\n    x = 2",
        ),
        (style.asserts_on_input, "proto/codec.py", "def read(value):\n    assert value"),
        (
            style.asserts_on_input,
            "proto/codec.py",
            "def _array():\n    def check(value):\n        assert value > 0",
        ),
        (style.asks_for_a_policy, "engine/checkpoint/model.py", 'x = policy.name == "ar"'),
        (
            style.asks_for_a_policy,
            "engine/checkpoint/model.py",
            'match x:\n    case "sync":\n        pass',
        ),
        (style.names_that_are_no_sentences, "tests/test_x.py", "def test_codec():\n    assert x"),
        (style.names_that_are_no_sentences, "tests/test_x.py", "def test_the_tree_2():\n    pass"),
        (style.tests_without_an_assertion, "tests/test_x.py", "def test_it_runs_well():\n    f()"),
    ],
)
def test_a_violation_is_found(check: Check, path: str, text: str) -> None:
    assert len(check(source(path, text))) == 1


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (style.long_functions, "proto/tree.py", LONG_FUNCTION.replace("    pass\n", "", 1)),
        (style.long_file, "proto/tree.py", "x = 1\n" * style.MAX_FILE_LINES),
        (style.long_messages, "proto/tree.py", f"raise NodeError(f'{{x:.100f}} {'so ' * 32}')"),
        (style.broad_excepts, "proto/tree.py", "try:\n    x = 1\nexcept ValueError:\n    x = 2"),
        (
            style.broad_excepts,
            "proto/tree.py",
            "try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise",
        ),
        (
            style.broad_excepts,
            "coordinator/__main__.py",
            "try:\n    x = 1\nexcept Exception:\n    x = 2",
        ),
        (style.asks_for_a_policy, "engine/checkpoint/model.py", 'x = make("ar", K=4)'),
        (style.asserts_on_input, "proto/codec.py", "def _record(kind):\n    assert kind"),
        (
            style.tests_without_an_assertion,
            "tests/test_x.py",
            "def test_it_is_refused():\n    with pytest.raises(ValueError):\n        f()",
        ),
    ],
)
def test_what_is_right_is_not_found(check: Check, path: str, text: str) -> None:
    assert check(source(path, text)) == []
