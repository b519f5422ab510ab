"""Toy vocabularies of a target and of a drafter that has other tokens, as `engine.words.Words`.

The target's tokens are pairs of letters, some with a dash behind. The tokens of any text are found
from the left, so a text in bytes has one reading, and yet one token may begin as another does. The
drafter's tokens are all single letters, and some longer strings that lie across the target's
boundaries: the last of them change when the text goes on.
"""

from itertools import product
from random import Random

from drafter_node.translation.text import Languages
from tests.simulation.toys import ToyModel
from tests.words import ToyWords

END = "<e>"  # the written form of the token that ends a text, in both vocabularies
BEGINNING = "<b>"
NUM_LONGER = 12  # tokens of the drafter with several letters


def toy_languages(model: ToyModel, random: Random) -> Languages:
    """Return a vocabulary for the target of this model, and another one for its drafters.

    In half of them there are spaces, so that words end. The drafter's longer tokens have three
    letters, or else say two of the target's at once. In few of them they go on over a space, so
    that what was taken for settled may change.
    """
    letters = random.choice(("abc ", "abcd"))
    pairs = list(map("".join, product(letters, repeat=2)))
    random.shuffle(pairs)
    strings: list[str] = []
    for id_ in range(model.vocab_size):
        has_dash = id_ > 0 and random.random() < 0.2
        strings.append(strings[-1] + "-" if has_dash else pairs[id_])
    ends = [END, "<f>"][: len(model.stop_ids)]
    target = ToyWords(strings, ends)
    size, goes_on = random.choice((3, 3, None)), random.random() < 0.2
    longer: set[str] = set()
    for _ in range(NUM_LONGER):
        said = "".join(random.choices(strings, k=2))
        start = 0 if size is None else random.randint(0, len(said) - size)
        token = said[start : None if size is None else start + size]
        if goes_on or " " not in token[1:]:
            longer.add(token)
    single = sorted({*letters, *"-<>efb"})
    named = [END, BEGINNING]
    own_strings = [*single, *sorted(longer)]
    has_beginning = random.random() < 0.5
    starts = (len(own_strings) + 1,) if has_beginning else ()
    own = ToyWords(own_strings, named, starts)
    return Languages(own, target, (len(own_strings),))
