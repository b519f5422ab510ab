"""What the n-gram index costs as a text grows, and the memory of earlier texts as it fills.

`python -m lab.measure.ngram_index`
"""

import argparse
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from statistics import median

from engine.layout.earlier import MAX_MATCH, NUM_TOKENS, PIECE_LEN, EarlierTexts
from engine.layout.ngram import NgramIndex

LENGTHS = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000)
NUM_PROBES = 500  # at each length
NUM_DRAFTS = 8
VOCAB_SIZE = 4096


def words(number: int) -> list[int]:
    """Tokens as frequent as words are: their chance falls as one over their rank."""
    draw = random.Random(1)
    return [int(VOCAB_SIZE ** draw.random()) - 1 for _ in range(number)]


def loop(number: int) -> list[int]:
    """A text that says the same line for ever: every n-gram has thousands of places."""
    return [index % 12 for index in range(number)]


def measured(tokens: Sequence[int]) -> list[tuple[int, float, float]]:
    """(length, microseconds to add a token, to look up a draft) at each of LENGTHS: medians."""
    index = NgramIndex(ngram_min=2, ngram_max=4, seed=1)
    rows = []
    for length in LENGTHS:
        start = length - NUM_PROBES
        index.extend(tokens[len(index) : start])
        add_us, find_us = [], []
        for token in tokens[start:length]:
            add_us.append(_time_us(lambda: index.extend((token,))))  # noqa: B023
            find_us.append(_time_us(lambda: index.find(NUM_DRAFTS)))
        rows.append((length, median(add_us), median(find_us)))
    return rows


def measured_memory(tokens: Sequence[int]) -> list[tuple[int, float, float]]:
    """The same of earlier texts of 1,000 tokens each: before it is full, and after."""
    earlier, rows, length = EarlierTexts(), [], 1_000
    for number in (1_000, NUM_TOKENS // 4, 2 * NUM_TOKENS):
        add_us = []
        while number > 0:
            start = random.Random(number).randrange(len(tokens) - length)
            text = [number, *tokens[start : start + length]]
            piece = text[:PIECE_LEN]
            add_us.append(_time_us(lambda: earlier.add(piece)) / len(piece))  # noqa: B023
            earlier.add(text)
            number -= length
        find_us = []
        for end in range(MAX_MATCH, MAX_MATCH + NUM_PROBES):
            recent = tokens[end - MAX_MATCH : end]
            find_us.append(_time_us(lambda: _find(earlier, recent)))  # noqa: B023
        rows.append((len(earlier), median(add_us), median(find_us)))
    return rows


def _find(earlier: EarlierTexts, recent: Sequence[int]) -> object:
    return earlier.find(recent, least=2, limit=NUM_DRAFTS, is_tree=True)


def _time_us(work: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started) / 1e3


def memory_per_token(tokens: Sequence[int]) -> float:
    """Bytes that the index takes for each token of a text."""
    index = NgramIndex(ngram_min=2, ngram_max=4, seed=1)
    return _size(lambda: index.extend(tokens)) / len(tokens)


def _size(work: Callable[[], object]) -> int:
    """Bytes that are still taken when the work is done."""
    tracemalloc.start()
    work()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.measure.ngram_index", description=__doc__.splitlines()[0]
    )
    parser.parse_args()
    print(f"Python {sys.version.split()[0]}; n-grams of 2 to 4 tokens, drafts of {NUM_DRAFTS}")
    print(f"{'text':8}{'tokens':>8}{'add, us':>10}{'find, us':>10}")
    gc.disable()
    for make in (words, loop):
        tokens = make(LENGTHS[-1])
        for length, add_us, find_us in measured(tokens):
            print(f"{make.__name__:8}{length:8}{add_us:10.2f}{find_us:10.2f}")
        print(f"{make.__name__:8}{memory_per_token(tokens):8.0f} bytes a token")
        print(f"{'earlier':8}{'tokens':>8}{'add, us':>10}{'find, us':>10}")
        for length, add_us, find_us in measured_memory(tokens):
            print(f"{make.__name__:8}{length:8}{add_us:10.2f}{find_us:10.2f}")
    earlier = EarlierTexts()
    size = _size(lambda: earlier.add(range(2 * NUM_TOKENS)))
    print(f"full: {size / 2**20:.1f} MiB for {len(earlier)} tokens")


if __name__ == "__main__":
    main()
