"""Programs that stand in for llama.cpp's: scripts in the cache that print what was recorded.

COMPLETION, SPECULATIVE and BENCH were printed by version 0.5.0-dev (build 1, commit 0c1e570), with
the embedded target and drafter.
"""

import shlex
from pathlib import Path

PROMPT = [478, 888]  # "def read" for the embedded tokenizer
VERSION = "version: 0.5.0-dev (build 1, commit 0c1e570)\n"
COMPLETION = """\
0.00.057.861 I llama_completion: prompt: 'def read'
0.00.057.862 I llama_completion: number of tokens in prompt = 2
0.00.057.870 I    478 -> 'def'
0.00.057.871 I    888 -> ' read'
0.00.057.874 I sampler seed: 3
0.00.112.072 I common_perf_print:    sampling time =       0.85 ms
0.00.112.106 I common_perf_print:    samplers time =       0.70 ms /    52 tokens
0.00.112.136 I common_perf_print:        load time =      25.64 ms
0.00.112.158 I common_perf_print: prompt eval time =      13.15 ms /     2 tokens (    6.57 ms per \
token,   152.09 tokens per second)
0.00.112.181 I common_perf_print:        eval time =      20.00 ms /     4 runs   (    5.00 ms per \
token,   200.00 tokens per second)
0.00.112.202 I common_perf_print:       total time =      57.56 ms /    51 tokens
"""
SPECULATIVE = """\
0.22.181.910 I encoded    2 tokens in    0.040 seconds, speed:   50.000 t/s
0.22.181.928 I decoded    6 tokens in    0.600 seconds, speed:   10.000 t/s
0.22.181.938 I 
0.22.181.949 I n_draft   = 3
0.22.181.960 I n_predict = 6
0.22.181.970 I n_drafted = 8
0.22.181.981 I n_accept  = 2
0.22.181.992 I accept    = 25.000%
0.22.182.137 I common_perf_print: prompt eval time =     591.45 ms /    69 tokens (  227.41 ms per \
token,     4.40 tokens per second)
0.22.182.148 I common_perf_print:        eval time =       0.00 ms /     1 runs   (    0.00 ms per \
token,      inf tokens per second)
"""
BENCH = """\
[{"build_commit": "0c1e570", "n_threads": 1, "n_gen": 12, "avg_ts": 12.568574},
 {"build_commit": "0c1e570", "n_threads": 2, "n_gen": 12, "avg_ts": 20.11}]
"""
TEXT = "_lines(self"


def program(folder: Path, name: str, script: str) -> None:
    """Write a program into the folder that runs these lines of the shell."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def printing(output: str, messages: str) -> str:
    """Return lines of the shell that print these messages; with --version, llama.cpp's version.

    output  lines of the shell that write to standard output
    """
    return (
        f'if [ "$1" = --version ]; then printf %s {shlex.quote(VERSION)} >&2; exit; fi\n'
        f'echo "$@" >> "$0.given"\n'
        f"printf %s {shlex.quote(messages)} >&2\n{output}"
    )


def all_programs(folder: Path) -> None:
    """Write all four programs, which print what was recorded."""
    program(folder, "llama-completion", printing(f"printf '{TEXT}\\n\\n'", COMPLETION))
    prompt = 'while [ "$1" ]; do [ "$1" != -bf ] || cat "$2"; shift; done'
    text = f"printf '\\n\\n'; {prompt}; printf '{TEXT}\\n\\n\\n\\n'"
    program(folder, "llama-speculative-simple", printing(text, SPECULATIVE))
    program(folder, "llama-bench", printing(f"echo {shlex.quote(BENCH)}", ""))
    program(folder, "llama-quantize", 'cp "$1" "$2"; echo "$3" >> "$2"')
