"""llama.cpp as a peer for the benchmark, by its own programs (`build_llamacpp.py` builds them).

    python -m lab.experiments.peers.llamacpp TARGET DRAFTER DTYPE DEVICE MODE FILE

Requests and answers are those of `huggingface.py`; an answer may also be {"error": one line}. MODE
is plain (`llama-completion`), assisted or lookup (`llama-speculative-simple`, with the drafter, or
with n-grams of the text). Target and drafter are written as GGUF in DTYPE, so that both sides
compute with the same weights. FILE may name another target: a GGUF file, or a kind such as Q8_0,
into which `llama-quantize` then converts the target; empty: neither.

The programs take a text and print a text. The prompt's token ids are turned into text by the
target's tokenizer, and llama.cpp must read this text as the ids that the tokenizer gives. The
number of threads is chosen before the first text: the fastest on a short one.
"""

import contextlib
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine.checkpoint.checkpoint import find_checkpoint
from engine.checkpoint.tokenizer_files import read_tokenizer
from engine.errors import ModelError
from lab.experiments.peers import llamacpp_programs as programs
from lab.experiments.peers.gguf_file import CannotWrite, digest_of, kept, kept_model
from lab.experiments.peers.llamacpp_programs import Made, ProgramError, UnknownTimes

TRIAL = "def main():\n"  # what the number of threads is chosen on, with these
TRIAL_TOKENS, TRIAL_DRAFTS, TRIALS = 16, 3, 2
ROUNDED = 256  # the size of the cache is a multiple of this
ATTEMPTS = 4  # times that a text is written, because a program may lose its last lines


class Peer:
    """The target under llama.cpp, on a GPU or on CPU cores.

    file  GGUF file of the target, or the kind to convert it into; empty: in `dtype`
    """

    def __init__(
        self, target: str, drafter: str, dtype: str, device: str, mode: str, file: str
    ) -> None:
        assert mode in ("plain", "assisted", "lookup"), f"there is no mode {mode} here"
        self.mode = mode
        folder = find_checkpoint(target, None)
        self.tokenizer = read_tokenizer(folder).tokenizer
        place = ["-ngl", "99"] if device.startswith("cuda") else ["-dev", "none"]
        self._models = ["-m", target_file(folder, dtype, file), *place]
        if mode == "assisted":
            place = ["-ngld", "99"] if device.startswith("cuda") else ["-devd", "none"]
            self._models += ["-md", kept_model(find_checkpoint(drafter, None), dtype), *place]
            self._models += ["--spec-type", "draft-simple"]
        elif mode == "lookup":
            self._models += ["--spec-type", "ngram-simple"]
        self.num_threads = self._best_number_of_threads()

    def _best_number_of_threads(self) -> int:
        """Return the number of threads with which a short text is written fastest."""
        numbers = programs.numbers_of_threads(len(os.sched_getaffinity(0)))
        if len(numbers) == 1:
            return numbers[0]
        if self.mode == "plain":
            listed = ",".join(map(str, numbers))
            arguments = ["-p", 0, "-n", TRIAL_TOKENS, "-r", TRIALS, "-t", listed, "-o", "json"]
            return programs.fastest(
                programs.bench(programs.run(programs.BENCH, *self._models, *arguments)[0])
            )
        request = {"max_tokens": TRIAL_TOKENS, "temperature": 0.0, "setting": TRIAL_DRAFTS}
        speeds = dict.fromkeys(numbers, 0.0)
        for self.num_threads in numbers * TRIALS:
            made = self.write({**request, "seed": 0}, TRIAL)
            speeds[self.num_threads] = max(speeds[self.num_threads], made.tokens_per_second)
        return programs.fastest(speeds)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Generate at least `max_tokens` tokens for a request; return tokens, times and counts.

        The last pass of speculation may bring some more. The tokens are those that the tokenizer
        makes of the text. Raises ProgramError.
        """
        prompt = self.tokenizer.decode(request["prompt"], skip_special_tokens=False)
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        made = self.write(request, prompt)
        if made.num_prompt_tokens != len(ids) or made.prompt_tokens not in ((), tuple(ids)):
            raise ProgramError("llama.cpp reads the prompt as other tokens than the target's are")
        if made.num_tokens < request["max_tokens"]:
            wanted = f"{request['max_tokens']} tokens were asked for"
            raise ProgramError(f"llama.cpp wrote {made.num_tokens}, and {wanted}")
        text = made.text.decode(errors="replace")
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        return {"tokens": tokens, **arrivals(made)}

    def write(self, request: dict[str, Any], prompt: str) -> Made:
        """Let the program of this mode write one text, again if lines are lost.

        Raises ProgramError.
        """
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(UnknownTimes):
                return self._written(request, prompt)
        return self._written(request, prompt)

    def _written(self, request: dict[str, Any], prompt: str) -> Made:
        """Let the program of this mode write one text. Raises ProgramError."""
        count = request["max_tokens"]
        most = len(prompt.encode()) + count + ROUNDED  # a token has a byte at least
        arguments = [
            *(*self._models, "--no-escape", "--ignore-eos", "-s", request["seed"]),
            *("-c", most // ROUNDED * ROUNDED, "-t", self.num_threads, "-tb", self.num_threads),
            *sampling(request),
        ]
        with tempfile.NamedTemporaryFile(suffix=".txt") as file:
            file.write(prompt.encode())
            file.flush()
            arguments += ["-bf", file.name]
            if self.mode == "plain":
                more = ["-n", count, "-no-cnv", "--no-display-prompt", "--verbose-prompt"]
                return programs.completion(*programs.run(programs.COMPLETION, *arguments, *more))
            more = ["-n", count - 1]  # it writes until it has more
            if self.mode == "assisted":
                more += ["-td", self.num_threads, "-tbd", self.num_threads]
                more += ["--spec-draft-n-max", request["setting"] or TRIAL_DRAFTS]
            made = programs.run(programs.SPECULATIVE, *arguments, *more)
            return programs.speculative(*made, prompt.encode())


def target_file(target: Path, dtype: str, file: str = "") -> Path:
    """Return the GGUF file of the target, which is made if it is not in the cache.

    file  the file itself, or the kind to convert it into; empty: in `dtype`

    Raises ProgramError, CannotWrite.
    """
    if file.endswith(".gguf"):
        return Path(file)
    whole = kept_model(target, dtype)
    if not file:
        return whole
    name = f"{digest_of(target, dtype, file)}-{file}"
    return kept(name, lambda path: _quantize(whole, path, file))


def _quantize(whole: Path, path: Path, kind: str) -> None:
    """Write the quantised form of a GGUF file. Raises ProgramError."""
    programs.run(programs.QUANTIZE, whole, path, kind)


def sampling(request: dict[str, Any]) -> list[object]:
    """Return the arguments that choose tokens as a pair does: these filters, in this order."""
    temperature = request["temperature"]
    if temperature == 0:
        return ["--samplers", "temperature", "--temp", 0]
    names, values = ["temperature"], ["--temp", temperature]
    for name, flag, none in (
        ("min_p", "--min-p", 0.0),
        ("top_k", "--top-k", 0),
        ("top_p", "--top-p", 1.0),
    ):
        if request.get(name, none) != none:
            names.append(name)
            values += [flag, request[name]]
    return ["--samplers", ";".join(names), *values]


def arrivals(made: Made) -> dict[str, list[Any]]:
    """Return `times` and `counts` of an answer: as many arrivals as there were passes.

    A program states only how long all of them took, so they stand at equal distances.
    """
    step_s = made.writing_s / made.num_passes
    times = [made.prompt_s + step_s * number for number in range(1, made.num_passes + 1)]
    left = made.num_tokens - made.has_first_free
    ends = [left * number // made.num_passes for number in range(made.num_passes + 1)]
    counts = [after - before for before, after in itertools.pairwise(ends)]
    if made.has_first_free:
        times, counts = [made.prompt_s, *times], [1, *counts]
    return {"times": times, "counts": counts}


def main() -> None:
    """Prepare the models, say that the peer is ready, and answer until standard input ends."""
    try:
        peer = Peer(*sys.argv[1:7])
        threads = f"{peer.num_threads} thread{'s' * (peer.num_threads > 1)}"
        print(json.dumps({"ready": f"{programs.version()}, {threads}"}), flush=True)
        for line in sys.stdin:
            print(json.dumps(peer.answer(json.loads(line))), flush=True)
    except (ProgramError, CannotWrite, ModelError) as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
