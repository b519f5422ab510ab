"""Times the n-gram index as a text grows, and the store of earlier texts as it fills.

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
NUM_PROBES = 500  # timed calls at each length
NUM_DRAFTS = 8
VOCAB_SIZE = 4096


def words(number: int) -> list[int]:
    """Return random tokens with the frequencies of words: a chance proportional to 1 / rank."""
    draw = random.Random(1)
    return [int(VOCAB_SIZE ** draw.random()) - 1 for _ in range(number)]


def loop(number: int) -> list[int]:
    """Return a text that repeats 12 tokens, so that every n-gram occurs thousands of times."""
    return [index % 12 for index in range(number)]


def measured(tokens: Sequence[int]) -> list[tuple[int, float, float]]:
    """Return (length, us to add a token, us to look up a draft) at each of LENGTHS: medians."""
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
    """Return (tokens, us to add a token, us to look up a draft) of the store of earlier texts.

    The texts have 1,000 tokens each; it is measured before the store is full, and after.
    """
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
    """Look up a tree of drafts in the earlier texts, and return it."""
    return earlier.find(recent, least=2, limit=NUM_DRAFTS, is_tree=True)


def _time_us(work: Callable[[], object]) -> float:
    """Return the microseconds that a call takes."""
    started = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started) / 1e3


def memory_per_token(tokens: Sequence[int]) -> float:
    """Return the bytes of memory that the index takes for each token of a text."""
    index = NgramIndex(ngram_min=2, ngram_max=4, seed=1)
    return _size(lambda: index.extend(tokens)) / len(tokens)


def _size(work: Callable[[], object]) -> int:
    """Return the bytes of memory that are still in use when the work is done."""
    tracemalloc.start()
    work()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size


def main() -> None:
    """Print the times and the memory of the n-gram index and of the store of earlier texts."""
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
