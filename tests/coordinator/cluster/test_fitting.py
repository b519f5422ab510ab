"""Which tokenizers fit together, and who is given the target's."""

from dataclasses import replace

import pytest

from coordinator.cluster.fitting import TargetWords, difference, first_difference
from coordinator.cluster.registry import Registry
from proto.messages import MAX_TOKENIZER_BYTES, Fault, Fingerprint, Hello, Role, Welcome
from tests.coordinator.test_behaviours import hello

TARGET = hello(Role.TARGET, logits_size=128)
SAME = hello(Role.DRAFTER, logits_size=112)
OTHER = hello(Role.DRAFTER, size=50, digest="y", logits_size=64)
WORDLESS = hello(Role.DRAFTER, digest="")
HEAD = replace(OTHER, layers=(1,))
WORDS = TargetWords(TARGET.fingerprint.digests, lambda: b"packed")


@pytest.mark.parametrize(
    ("drafter", "words", "fits"),
    [
        (SAME, None, True),
        (SAME, WORDS, True),
        (OTHER, None, False),
        (OTHER, WORDS, True),
        (WORDLESS, WORDS, False),
        (HEAD, WORDS, False),
    ],
)
def test_another_tokenizer_fits_if_it_can_be_translated(
    drafter: Hello, words: TargetWords | None, *, fits: bool
) -> None:
    assert (difference(drafter, TARGET, words) is None) is fits
    others = [(b"target-1", TARGET), (b"drafter-2", replace(SAME, layers=drafter.layers))]
    assert (first_difference(b"drafter-1", drafter, others, words) is None) is fits


def greeted(registry: Registry, hello_: Hello, source: int) -> Welcome | Fault:
    node = registry.of(hello_.role)
    assert node is not None
    return registry.greet(node, hello_, source)


def begun(words: TargetWords | None) -> Registry:
    registry = Registry("secret")
    registry.words = words
    for role in Role:
        registry.expect(role, role.value.encode(), 0.0)
    return registry


def test_a_drafter_with_another_tokenizer_is_given_the_targets_and_keeps_its_own_ids() -> None:
    registry = begun(WORDS)
    assert greeted(registry, TARGET, 1) == Welcome(100, 1)
    assert greeted(registry, OTHER, 0) == Welcome(50, 0, tokenizer=b"packed")


def test_the_target_may_choose_ids_that_such_a_drafter_lacks() -> None:
    registry = begun(WORDS)
    assert greeted(registry, OTHER, 0) == Welcome(50, 0, tokenizer=b"packed")
    assert greeted(registry, TARGET, 1) == Welcome(100, 1)


def test_a_drafter_with_the_same_tokenizer_is_given_none() -> None:
    registry = begun(WORDS)
    greeted(registry, TARGET, 1)
    assert greeted(registry, SAME, 0) == Welcome(100, 0)


def test_without_a_translation_it_is_refused() -> None:
    registry = begun(None)
    greeted(registry, TARGET, 1)
    assert isinstance(greeted(registry, OTHER, 0), Fault)


def test_a_tokenizer_that_fits_into_no_message_is_refused_in_words() -> None:
    registry = begun(TargetWords(frozenset("x"), lambda: bytes(MAX_TOKENIZER_BYTES + 1)))
    greeted(registry, TARGET, 1)
    refusal = greeted(registry, OTHER, 0)
    assert isinstance(refusal, Fault)
    assert refusal.detail.startswith("the target's tokenizer is too large to be sent")
    assert isinstance(greeted(registry, SAME, 0), Welcome)


# What tokenizer.json says has the digest "x" and 100 tokens; files beside it may add others.
MORE = Fingerprint(102, "x and more", (2,), file_digest="x")
OTHERS = Fingerprint(101, "x and others", (2,), file_digest="x")


@pytest.mark.parametrize(
    ("own", "targets", "num_drafted"),
    [
        (TARGET.fingerprint, MORE, 100),
        (MORE, TARGET.fingerprint, 100),
        (OTHERS, MORE, 101),
        (Fingerprint(102, "x and more", (2,)), MORE, 102),
        (MORE, Fingerprint(102, "x and more", (2,), file_digest="y"), 102),
    ],
)
@pytest.mark.parametrize("has_words", [False, True])
def test_tokenizers_fit_if_all_their_tokens_agree_or_those_of_tokenizer_json(
    own: Fingerprint, targets: Fingerprint, num_drafted: int, *, has_words: bool
) -> None:
    target, drafter = replace(TARGET, fingerprint=targets), replace(SAME, fingerprint=own)
    assert difference(drafter, target) is None
    registry = begun(TargetWords(targets.digests, lambda: b"packed") if has_words else None)
    greeted(registry, target, 1)
    assert greeted(registry, drafter, 0) == Welcome(num_drafted, 0)


def test_tokens_that_only_other_files_state_make_no_two_tokenizers_alike() -> None:
    other = replace(SAME, fingerprint=Fingerprint(101, "y and more", (2,), file_digest="y"))
    assert difference(other, replace(TARGET, fingerprint=MORE)) is not None


def test_without_a_tokenizer_the_numbers_of_ids_must_agree() -> None:
    target, drafter = Fingerprint(100, "", ()), Fingerprint(99, "", ())
    assert target.is_like(replace(target))
    assert not target.is_like(drafter)


def test_the_tokenizer_is_packed_once() -> None:
    packed: list[int] = []

    def pack() -> bytes:
        packed.append(1)
        return b"x"

    words = TargetWords(frozenset("t"), pack)
    assert (words.packed, words.packed, len(packed)) == (b"x", b"x", 1)


def test_a_fingerprint_without_a_tokenizer_never_asks_for_one() -> None:
    registry = begun(WORDS)
    no_tokenizer = replace(TARGET, fingerprint=Fingerprint(128, "", ()))
    welcome = greeted(registry, no_tokenizer, 1)
    assert isinstance(welcome, Welcome)
    assert welcome.tokenizer == b""
