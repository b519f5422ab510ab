"""Prompts from the command line, from standard input and from files.

A file holds one prompt per line, or JSON Lines: per line an object with a string under `prompt`, or
with several under `turns`, of which the first is taken. The suffix decides (.jsonl and .ndjson, or
.txt); a file of another name is JSON Lines if its first line is such an object. Empty lines
separate nothing and are left out.
"""

import json
import sys
from pathlib import Path
from typing import BinaryIO

from proto.errors import ConfigurationError, shown
from proto.system_errors import cannot_read

KEY, TURNS = "prompt", "turns"
JSON_SUFFIXES = (".jsonl", ".ndjson")
MAX_BYTES = 1 << 28


def from_argument(prompt: str) -> str:
    """The prompt itself; `-` is all of standard input. Raises ConfigurationError."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise ConfigurationError("standard input is closed; it is read because PROMPT is `-`")
    text = _decoded(_read(sys.stdin.buffer, "standard input"), "standard input")
    if not text:
        raise ConfigurationError("standard input is empty; it is read because PROMPT is `-`")
    return text


def from_file(path: Path) -> list[str]:
    """The prompts in a file, at least one. Raises ConfigurationError."""
    lines = lines_of(path)
    if is_json(path, lines[0][1]):
        return [_prompt_of(line, f"{path}, line {number}") for number, line in lines]
    return [line for _, line in lines]


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, at least one, numbered. Raises ConfigurationError."""
    numbered = enumerate(text_of(path).split("\n"), start=1)
    lines = [(number, line.rstrip("\r")) for number, line in numbered if line.strip()]
    if not lines:
        raise ConfigurationError(f"{path} has no prompts: every line is empty")
    return lines


def text_of(path: Path) -> str:
    """All of a file. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            data = _read(file, str(path))
    except ValueError as error:  # it has a NUL
        raise ConfigurationError(
            f"cannot read {shown(str(path))}: no file has such a name"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {cannot_read(error)}") from error
    return _decoded(data, str(path))


def _read(file: BinaryIO, where: str) -> bytes:
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigurationError(f"{where} is larger than {MAX_BYTES >> 20} MiB; split it")
    return data


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where} is not UTF-8 (byte {error.start})") from error


def is_json(path: Path, first_line: str) -> bool:
    """Whether a file is JSON Lines."""
    if path.suffix in (*JSON_SUFFIXES, ".txt"):
        return path.suffix in JSON_SUFFIXES
    try:
        record = json.loads(first_line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and bool({KEY, TURNS} & record.keys())


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not JSON ({error})") from error
    match record:
        case {"prompt": str(prompt)} | {"turns": [str(prompt), *_]}:
            return prompt
        case {"prompt": _}:
            raise ConfigurationError(f'{where}: "{KEY}" must be a string')
        case {"turns": _}:
            raise ConfigurationError(f'{where}: "{TURNS}" must begin with a string')
    raise ConfigurationError(f'{where}: expected an object with a "{KEY}"')
