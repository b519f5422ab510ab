"""Checks of style: each takes a file and returns what is wrong with it, one line each."""

import ast
import re
from collections.abc import Iterator

from proto.policies import POLICIES
from tests.architecture.sources import Source

MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 600
MAX_COLUMNS = 100
MIN_WORDS = 3
# Spelt so that this file does not contain them.
LEFTOVERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b|breakpoint\(|import pd" r"b")
PRAGMA = re.compile(r"\s+# (type: ignore|noqa|fmt:).*$")
BROAD = {"Exception", "BaseException"}
# Who sees an error of an import sees a traceback, too.
MESSAGES = re.compile(r"((?<!Import)(?<!Attribute)Error|\blogger\.\w+)$|^(warn|self\._warn)$")
READERS = {
    "read",
    "check",
    "decode",
    "kind_of",
    "session_of",
    "_check_proposals",
    "_check_rows",
    "_flag",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(file: Source) -> Iterator[Function]:
    """Every function of a file, inner ones too."""
    for node in file.nodes:
        if isinstance(node, Function):
            yield node


def long_functions(file: Source) -> list[str]:
    """Functions of too many lines, decorators and docstring included."""
    wrong = []
    for function in functions(file):
        first = min([function.lineno, *(item.lineno for item in function.decorator_list)])
        num_lines = (function.end_lineno or first) - first + 1
        if num_lines > MAX_FUNCTION_LINES:
            wrong.append(f"{file.path}:{first} {function.name} has {num_lines} lines")
    return wrong


def long_file(file: Source) -> list[str]:
    """A file of too many lines."""
    num_lines = len(file.text.splitlines())
    return [f"{file.path} has {num_lines} lines"] if num_lines > MAX_FILE_LINES else []


def long_lines(file: Source) -> list[str]:
    """Lines of too many columns; words to a tool at the end of a line do not count."""
    return [
        f"{file.path}:{number} has {len(line)} columns"
        for number, line in enumerate(file.text.splitlines(), 1)
        if len(PRAGMA.sub("", line)) > MAX_COLUMNS
    ]


def long_messages(file: Source) -> list[str]:
    """Errors and warnings that are too long, even if all that is filled in were short."""
    return [
        f"{file.path}:{node.lineno} says {len(words)} columns: {words}"
        for node in file.nodes
        if isinstance(node, ast.Call) and MESSAGES.search(ast.unparse(node.func)) and node.args
        if len(words := _words(node.args[0])) > MAX_COLUMNS
    ]


def _words(node: ast.expr) -> str:
    """Of a text that is written there, each part that is filled in being two columns long."""
    match node:
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(_words(part) for part in parts)
        case ast.FormattedValue():
            return "xx"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _words(left) + _words(right)
    return ""


def leftovers(file: Source) -> list[str]:
    """Notes to oneself and debugging."""
    return [
        f"{file.path}:{number} has {found.group()}"
        for number, line in enumerate(file.text.splitlines(), 1)
        if (found := LEFTOVERS.search(line))
    ]


def broad_excepts(file: Source) -> list[str]:
    """Handlers that end every exception, where it is not a process's main."""
    if file.path.name == "__main__.py":
        return []
    return [
        f"{file.path}:{node.lineno} catches everything"
        for node in file.nodes
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or _names(node.type) & BROAD)
        and not isinstance(node.body[-1], ast.Raise)
    ]


def _names(node: ast.expr) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def asserts_on_input(file: Source) -> list[str]:
    """Assertions in functions that read what a peer has sent."""
    return [
        f"{file.path}:{node.lineno} {function.name} asserts"
        for function in functions(file)
        if function.name in READERS
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
    ]


def asks_for_a_policy(file: Source) -> list[str]:
    """Comparisons with the name of a policy: what it does is in the table (`proto/policies.py`)."""
    asked: list[ast.expr] = []
    for node in file.nodes:
        match node:
            case ast.Compare(left=left, comparators=others):
                asked += [left, *others]
            case ast.MatchValue(value=value):
                asked.append(value)
    return [
        f"{file.path}:{item.lineno} asks for {item.value!r}"
        for item in asked
        # "auto" is a value of other settings too.
        if isinstance(item, ast.Constant) and item.value in POLICIES.keys() - {"auto"}
    ]


def tests_of(file: Source) -> Iterator[Function]:
    """The test functions of a file."""
    return (function for function in functions(file) if function.name.startswith("test"))


def names_that_are_no_sentences(file: Source) -> list[str]:
    """Test names of too few words, or counted instead of named."""
    return [
        f"{file.path}:{test.lineno} {test.name}"
        for test in tests_of(file)
        if len(test.name.split("_")) < 1 + MIN_WORDS or re.search(r"_\d+$", test.name)
    ]


def tests_without_an_assertion(file: Source) -> list[str]:
    """Tests that cannot fail but by accident. A helper that asserts must say so in its name."""
    return [
        f"{file.path}:{test.lineno} {test.name}"
        for test in tests_of(file)
        if not any(_asserts(node) for node in ast.walk(test))
    ]


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in {"raises", "warns", "fail"} or name.lstrip("_").startswith(("assert", "check"))
