"""llama.cpp as a peer: what its programs are asked, and what is read from what they print."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lab.experiments import engines
from lab.experiments.description import experiment
from lab.experiments.engines import host_of, what_is_missing
from lab.experiments.peers import gguf_file, llamacpp, llamacpp_programs, write_gguf
from lab.experiments.peers.gguf_file import (
    CONTROL,
    NORMAL,
    CannotWrite,
    digest_of,
    kept,
    vocabulary,
)
from lab.experiments.peers.llamacpp import target_file
from lab.experiments.peers.llamacpp_programs import ProgramError
from proto.installation import MODELS
from tests.lab.experiments.stand_ins import (
    BENCH,
    COMPLETION,
    PROMPT,
    SPECULATIVE,
    TEXT,
    all_programs,
    program,
)

TARGET, DRAFTER = str(MODELS / "target"), str(MODELS / "drafter")
GREEDY = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.0, "setting": None, "seed": 3}
SAMPLED = {**GREEDY, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the stand-ins, in a cache of its own; models are written as empty files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(gguf_file, "write", lambda *given: given[-1].touch())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    folder = tmp_path / "slipstream" / "llama.cpp" / "bin"
    all_programs(folder)
    return folder


def peer(mode: str, file: str = "") -> llamacpp.Peer:
    return llamacpp.Peer(TARGET, DRAFTER, "bfloat16", "cpu", mode, file)


def given(programs: Path, name: str) -> str:
    """What the program was started with the last time."""
    return (programs / f"{name}.given").read_text().splitlines()[-1]


def test_plain_decoding_is_timed_by_the_programs_own_line_without_loading_and_prompt() -> None:
    made = llamacpp_programs.completion(f"{TEXT}\n\n".encode(), COMPLETION)
    assert (made.text, made.prompt_tokens) == (TEXT.encode(), tuple(PROMPT))
    assert (made.num_tokens, made.prompt_s, made.writing_s) == (5, 0.01315, 0.02)
    assert made.tokens_per_second == 200.0
    found = llamacpp.arrivals(made)
    assert found["counts"] == [1, 1, 1, 1, 1]
    assert found["times"] == pytest.approx([0.01315, 0.01815, 0.02315, 0.02815, 0.03315])


def test_speculation_has_as_many_arrivals_as_passes() -> None:
    output = f"\n\ndef read{TEXT}\n\n\n\n".encode()
    made = llamacpp_programs.speculative(output, SPECULATIVE, b"def read")
    assert (made.text, made.num_tokens, made.num_passes) == (TEXT.encode(), 6, 4)
    assert made.tokens_per_second == pytest.approx(10.0)
    found = llamacpp.arrivals(made)
    assert found["counts"] == [1, 2, 1, 2]
    assert found["times"] == pytest.approx([0.19, 0.34, 0.49, 0.64])


@pytest.mark.parametrize("cut", ["prompt eval time", "    eval time", "encoded", "n_accept"])
def test_a_program_that_prints_other_lines_is_refused_in_one_line(cut: str) -> None:
    def read() -> None:
        if cut.endswith("time"):
            llamacpp_programs.completion(b"", without(COMPLETION))
        llamacpp_programs.speculative(b"\n\ndef", without(SPECULATIVE), b"def")

    def without(messages: str) -> str:
        return "\n".join(line for line in messages.splitlines() if cut not in line)

    with pytest.raises(ProgramError, match="prints unknown times; use `python -m lab") as told:
        read()
    assert len(str(told.value)) <= 100


def test_the_number_of_threads_is_the_fastest_one() -> None:
    speeds = llamacpp_programs.bench(BENCH.encode())
    assert speeds == {1: 12.568574, 2: 20.11}
    assert llamacpp_programs.fastest(speeds) == 2
    assert llamacpp_programs.fastest({2: 5.0, 1: 5.0}) == 1
    assert [*llamacpp_programs.numbers_of_threads(6)] == [1, 2, 4, 6]
    assert [*llamacpp_programs.numbers_of_threads(1)] == [1]
    for output in (b"{}", b"[1]", b""):
        with pytest.raises(ProgramError, match="llama-bench prints unknown times"):
            llamacpp_programs.bench(output)


def test_a_greedy_text_is_asked_of_the_completion_program(programs: Path) -> None:
    found = peer("plain").answer(GREEDY)
    words = given(programs, "llama-completion")
    assert "--samplers temperature --temp 0 " in words
    assert "-t 2 -tb 2 " in words
    assert "-s 3 " in words
    assert "-n 5 " in words
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    assert tokenizer.decode(found["tokens"]) == TEXT
    assert sum(found["counts"]) == 5


def test_speculation_is_asked_of_the_other_one_with_drafter_and_k(programs: Path) -> None:
    both = peer("assisted")
    found = both.answer({**SAMPLED, "setting": 6})
    words = given(programs, "llama-speculative-simple")
    assert "--spec-type draft-simple " in words
    assert "--spec-draft-n-max 6" in words
    assert "--samplers temperature --temp 0.8 " in words
    assert "-n 4 " in words  # it goes on until it has more
    assert sum(found["counts"]) == 6
    assert both.num_threads == 1  # both were as fast
    peer("lookup").answer(SAMPLED)
    assert "--spec-type ngram-simple " in given(programs, "llama-speculative-simple")


def test_filters_are_applied_in_the_order_of_a_pair() -> None:
    asked = {**SAMPLED, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
    assert llamacpp.sampling(asked) == [
        *("--samplers", "temperature;min_p;top_k;top_p", "--temp", 0.8),
        *("--min-p", 0.1, "--top-k", 20, "--top-p", 0.9),
    ]


def test_a_prompt_that_llama_cpp_reads_as_other_tokens_is_an_error(programs: Path) -> None:
    one = peer("plain")
    with pytest.raises(ProgramError, match="reads the prompt as other tokens"):
        one.answer({**GREEDY, "prompt": [478, 63]})  # as many tokens, and another one
    with pytest.raises(ProgramError, match="reads the prompt as other tokens"):
        peer("assisted").answer({**GREEDY, "prompt": [478]})  # another number of them


def test_a_text_whose_last_lines_were_lost_is_written_again(programs: Path) -> None:
    one = peer("plain")
    path = programs / "llama-completion"
    lost = "\n".join(COMPLETION.splitlines()[:-3])
    script = path.read_text()
    first = f'if [ ! -e "$0.lost" ]; then touch "$0.lost"; echo "{lost}" >&2; exit; fi'
    path.write_text(script.replace("#!/bin/sh", f"#!/bin/sh\n{first}"))
    assert sum(one.answer(GREEDY)["counts"]) == 5
    path.write_text(script.replace("#!/bin/sh", "#!/bin/sh\nexit"))
    with pytest.raises(ProgramError, match="llama-completion prints unknown times"):
        one.answer(GREEDY)


def test_a_text_that_is_too_short_is_an_error(programs: Path) -> None:
    with pytest.raises(ProgramError, match="wrote 5, and 64 tokens were asked for"):
        peer("plain").answer({**GREEDY, "max_tokens": 64})


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("exec sleep 60", "llama-bench was ended after 0.2 s without a result"),
        ("echo 'error: invalid argument: -r' >&2; exit 1", "llama-bench ended with status 1: err"),
        ("kill -SEGV $$", "llama-bench ended with status -11"),
        ("echo no", "llama-bench prints unknown times; use `python -m lab.exp"),
    ],
)
def test_a_program_that_hangs_or_crashes_is_one_line_of_the_peer(
    script: str,
    line: str,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program(programs, "llama-bench", script)
    whole: Callable[..., Any] = llamacpp_programs.run
    monkeypatch.setattr(llamacpp_programs, "run", lambda *args: whole(*args, limit_s=0.2))
    monkeypatch.setattr("sys.argv", ["llamacpp", TARGET, DRAFTER, "bfloat16", "cpu", "plain", ""])
    llamacpp.main()
    (said,) = capsys.readouterr().out.splitlines()
    error = json.loads(said)["error"]
    assert error.startswith(line)
    assert len(error) <= 100


def test_without_the_programs_the_arm_is_left_out_and_the_command_is_named(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.PEERS, "llamacpp", ("lab.experiments.peers.llamacpp", ()))
    tables = {"title": "t", "arms": [{"peer": "llamacpp"}], "baseline": {}}
    (arm,) = experiment(tables, Path(), {}).arms
    assert what_is_missing(arm) == ""
    (programs / "llama-quantize").unlink()
    assert what_is_missing(arm) == "build it: `python -m lab.experiments.peers.build_llamacpp`"
    path = programs.parent / "elsewhere"
    all_programs(path)
    monkeypatch.setenv("PATH", str(path))
    assert what_is_missing(arm) == ""


def test_each_mode_and_file_has_a_process_so_that_one_that_fails_takes_no_other_along() -> None:
    tables = [{"peer": "llamacpp", "mode": ["plain", "assisted"], "peer_file": ["", "Q8_0"]}]
    found = experiment({"title": "t", "arms": tables, "baseline": {}}, Path(), {}).arms
    assert len({host_of(arm) for arm in found}) == 4
    assert [arm.name for arm in found][:2] == ["llamacpp plain", "llamacpp plain Q8_0"]


def test_a_quantised_target_is_made_of_the_whole_one_once(programs: Path) -> None:
    path = target_file(MODELS / "target", "bfloat16", "Q8_0")
    assert path.read_text() == "Q8_0\n"
    path.write_text("kept")
    assert target_file(MODELS / "target", "bfloat16", "Q8_0").read_text() == "kept"
    assert target_file(MODELS / "target", "bfloat16", "some.gguf") == Path("some.gguf")


def test_a_command_prints_the_path_of_the_file_that_the_peer_runs(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["write_gguf", TARGET, "bfloat16", "Q8_0"])
    assert write_gguf.main() == 0
    assert capsys.readouterr().out == f"{target_file(MODELS / 'target', 'bfloat16', 'Q8_0')}\n"
    program(programs, "llama-quantize", "exit 1")
    monkeypatch.setattr("sys.argv", ["write_gguf", TARGET, "bfloat16", "Q7"])
    assert write_gguf.main() == 1
    assert capsys.readouterr().err == "error: llama-quantize ended with status 1\n"
    monkeypatch.setattr("sys.argv", ["write_gguf", "./nowhere", "bfloat16"])
    assert write_gguf.main() == 1
    assert capsys.readouterr().err.startswith("error: ./nowhere: ")


def test_the_cache_knows_a_model_by_its_content_and_keeps_the_newest(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    first = digest_of(model, "float32")
    assert digest_of(model, "bfloat16") != first
    (model / "config.json").write_text("{ }")
    assert digest_of(model, "float32") != first
    with pytest.raises(ZeroDivisionError):
        kept("broken", lambda path: path.touch() or 1 / 0)  # type: ignore[func-returns-value]
    monkeypatch.setattr(gguf_file, "MAX_BYTES", 2)
    first_file = kept("first", lambda path: path.write_text("xx"))  # type: ignore[func-returns-value]
    os.utime(first_file, (0, 0))
    kept("second", lambda path: path.write_text("x"))  # type: ignore[func-returns-value]
    assert [file.name for file in first_file.parent.iterdir()] == ["second.gguf"]


def test_the_vocabulary_of_the_embedded_pair_is_written_whole() -> None:
    words = vocabulary(MODELS / "target", 4098)
    assert (words.tokens[0], words.kinds[0]) == ("<|endoftext|>", CONTROL)
    assert (words.tokens[888], words.kinds[888]) == ("Ġread", NORMAL)
    assert words.tokens[4096:] == ["[unused 4096]", "[unused 4097]"]
    assert words.merges[0] == "Ġ Ġ"


def test_tokens_that_only_other_files_state_are_written_too(tmp_path: Path) -> None:
    shutil.copy(MODELS / "target" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|a|>", "pad_token": "<|b|>"}')
    words = vocabulary(tmp_path, 4097)  # without a row for the second
    assert (words.tokens[4096], words.kinds[4096]) == ("<|a|>", CONTROL)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    about = json.loads((MODELS / "target" / "tokenizer.json").read_text("utf-8"))
    about["pre_tokenizer"] = {"type": "Metaspace"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(CannotWrite, match="writes only byte-level BPE tokenizers as GGUF"):
        vocabulary(tmp_path, 4096)


def test_the_file_has_the_weights_and_the_tokenizer(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    gguf_file.write(MODELS / "drafter", "float32", tmp_path / "drafter.gguf")
    read = gguf.GGUFReader(tmp_path / "drafter.gguf")
    about = json.loads((MODELS / "drafter" / "config.json").read_text())
    assert {tensor.name for tensor in read.tensors} >= {"token_embd.weight", "blk.0.attn_q.weight"}
    assert read.fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert len(read.fields["tokenizer.ggml.tokens"].contents()) == about["vocab_size"]
    assert read.fields["tokenizer.ggml.add_bos_token"].contents() is False


# What follows runs llama.cpp itself, where it was built and `gguf` is installed.


@pytest.mark.parametrize("mode", ["plain", "assisted", "lookup"])
def test_llama_cpp_writes_the_greedy_text_of_the_target_in_float32(mode: str) -> None:
    pytest.importorskip("gguf")
    if llamacpp_programs.what_is_missing():
        pytest.skip("llama.cpp's programs are not built")
    from lab.experiments.peers.huggingface import Peer

    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    request = {**GREEDY, **filters, "prompt": [*PROMPT, 63, 1206, 8], "max_tokens": 24}
    ours = Peer(TARGET, DRAFTER, "float32", "cpu").answer({**request, "mode": "plain"})
    theirs = llamacpp.Peer(TARGET, DRAFTER, "float32", "cpu", mode, "").answer(request)
    assert theirs["tokens"][:24] == ours["tokens"]
