"""Prompts from files, and what is said of files that hold none."""

import io
import sys
from pathlib import Path

import pytest

from coordinator.api.prompts import from_argument, from_file
from proto.errors import ConfigurationError


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_holds_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path, "p.txt", '\ufeffdef f():\r\n\n   \n  indented \n{"prompt": 1}\nlast')
    assert from_file(path) == ["def f():", "  indented ", '{"prompt": 1}', "last"]


def test_json_lines_may_hold_newlines_and_other_keys(tmp_path: Path) -> None:
    lines = '{"prompt": "a\\nb", "id": 3}\n\n{"prompt": "\\u2028é"}\n'
    assert from_file(written(tmp_path, "p.jsonl", lines)) == ["a\nb", "\u2028é"]
    assert from_file(written(tmp_path, "prompts", lines)) == ["a\nb", "\u2028é"]


def test_of_a_conversation_the_first_turn_is_the_prompt(tmp_path: Path) -> None:
    lines = '{"turns": ["a", "b"]}\n{"prompt": "c", "turns": ["d"]}\n'
    assert from_file(written(tmp_path, "p.jsonl", lines)) == ["a", "c"]
    assert from_file(written(tmp_path, "prompts", lines)) == ["a", "c"]


def test_the_content_of_a_file_without_a_known_suffix_decides(tmp_path: Path) -> None:
    assert from_file(written(tmp_path, "p", "[1]\n2\n")) == ["[1]", "2"]
    assert from_file(written(tmp_path, "q.json", '{"question": 1}\n')) == ['{"question": 1}']


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("p.txt", "", "has no prompts"),
        ("p.jsonl", "\n \n", "has no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "line 3: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', 'line 2: expected an object with a "prom'),
        ("p.jsonl", '"a"\n', 'line 1: expected an object with a "prompt"'),
        ("p.jsonl", '{"prompt": ["a"]}\n', 'line 1: "prompt" must be a string'),
        ("p.jsonl", '{"turns": []}\n', 'line 1: "turns" must begin with a string'),
        ("p", '{"prompt": "a"}\nno\n', "line 2: not JSON"),
    ],
)
def test_a_bad_file_is_one_line_that_says_where(
    tmp_path: Path, name: str, text: str, line: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_file(written(tmp_path, name, text))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_folder_and_other_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*: No such file"):
        from_file(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"cannot read .*: Is a directory"):
        from_file(tmp_path)
    (tmp_path / "b").write_bytes(b"ab\xff")
    with pytest.raises(ConfigurationError, match=r"not UTF-8 \(byte 2\)"):
        from_file(tmp_path / "b")


def test_a_dash_reads_all_of_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def standard_input(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    assert from_argument("text") == "text"
    standard_input("zwei\nZeilen é\n".encode())
    assert from_argument("-") == "zwei\nZeilen é\n"
    standard_input(b"")
    with pytest.raises(ConfigurationError, match="standard input is empty"):
        from_argument("-")
