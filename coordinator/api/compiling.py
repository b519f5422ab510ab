"""`python -m coordinator.api.compiling`: checks grammars in a process of its own.

Standard input: a line of JSON with the special tokens of the target's tokenizer, then a line for
each question: [kind, source, is_compact], or [FOLLOW, grammar, text] with the bytes of a text in
hexadecimal digits. Standard output: "ready", then a line of JSON for each answer: {"grammar": ...}
in llguidance's form, or {"error": ...}; to FOLLOW {"num_fitting": ...}, how many bytes the grammar
allows. The process ends with its input.

The library cannot be interrupted, and some schemas keep it busy for minutes before its own limits
count. So whoever asks ends this process if an answer takes too long (`grammars.py`). Grammars are
compiled with the code of the nodes, over a vocabulary of bytes.
"""

import json
import os
import queue
import sys
import threading
import time

from coordinator.api.endless import has_an_end
from coordinator.api.structured import FOLLOW, TOO_COMPLEX
from engine.choice import vocabulary
from engine.choice.vocabulary import Vocabulary
from engine.errors import GrammarError
from proto.messages import MAX_GRAMMAR_LEN

# Seconds of processor time that compiling may take. What takes longer would take the nodes as long,
# and other texts would wait for them.
COMPILE_S = 0.5
NUM_TRIED = 16  # tokens of an answer that are tried out: some grammars fail after the first one
LOOK_S = 1.0  # how often it is asked whether the parent is still there


def check(known: Vocabulary, kind: str, source: str, *, is_compact: bool) -> dict[str, str]:
    """Return {"grammar": ...} of what is wanted, or {"error": ...}: the end of a sentence."""
    try:
        grammar = _written(kind, source, is_compact=is_compact)
        began = time.thread_time()
        known.try_out(grammar, NUM_TRIED)
        took_s = time.thread_time() - began
    except GrammarError as error:
        return {"error": f"cannot be used: {error}"}
    if len(grammar) > MAX_GRAMMAR_LEN or took_s > COMPILE_S:
        return {"error": TOO_COMPLEX}
    if kind == "json" and not has_an_end(json.loads(source)):
        return {"error": "fits no JSON text: what the schema requires never ends"}
    return {"grammar": grammar}


def follow(known: Vocabulary, grammar: str, written: bytes) -> dict[str, int]:
    """Return {"num_fitting": ...}: how many bytes at the beginning of a text fit a grammar.

    It is all of them too where the grammar, which was checked, becomes too complex on the way.
    """
    try:
        return {"num_fitting": known.num_fitting(grammar, written)}
    except GrammarError:
        return {"num_fitting": len(written)}


def _written(kind: str, source: str, *, is_compact: bool) -> str:
    """Return a schema, pattern, list or grammar in the form that llguidance reads."""
    match kind:
        case "json" | "json_object":
            schema = "{}" if source.strip() == "true" else source  # the library wants a dict
            return vocabulary.of_json_schema(schema, is_compact=is_compact)
        case "regex":
            return vocabulary.of_regex(source)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(source))
            return vocabulary.of_lark("start: " + " | ".join(texts))
        case "grammar":
            return vocabulary.of_lark(source)
    raise AssertionError(f"unknown kind {kind}")


def _read(lines: "queue.SimpleQueue[str]") -> None:
    """Put the lines of standard input into a queue; end the process when they end."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # also while the library is busy


def _next(lines: "queue.SimpleQueue[str]", parent: int) -> str:
    """Wait for a line; end the process if its parent is gone, whose pipe a child may hold open."""
    while True:
        try:
            return lines.get(timeout=LOOK_S)
        except queue.Empty:
            if os.getppid() != parent:
                os._exit(0)


def main() -> None:
    """Answer until the input ends."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    parent = os.getppid()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    known = vocabulary.byte_vocabulary(json.loads(_next(lines, parent)))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        kind, source, more = json.loads(_next(lines, parent))
        answer: dict[str, str] | dict[str, int]
        if kind == FOLLOW:
            answer = follow(known, source, bytes.fromhex(more))
        else:
            answer = check(known, kind, source, is_compact=more)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
