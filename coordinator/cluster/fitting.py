"""Checks whether the models of two nodes fit together, by their Hello messages (pure).

Each function returns None if they do, else a line that says how they differ and what to do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from coordinator.text.session_events import NodeId
from proto.messages import MAX_TOKENIZER_BYTES, PROTOCOL_VERSION, Hello, Role

UNREADABLE = "its introduction cannot be read; run the same release of Slipstream on every host"


@dataclass(frozen=True)
class TargetWords:
    """The target's tokenizer, which is sent to drafters that have another one.

    digests  as in `Fingerprint`
    pack     makes the bytes that `Welcome.tokenizer` carries
    """

    digests: frozenset[str]
    pack: Callable[[], bytes]

    @cached_property
    def packed(self) -> bytes:
        """Return the tokenizer as bytes, packed once."""
        return self.pack()


def first_difference(
    node_id: NodeId,
    hello: Hello,
    others: Iterable[tuple[NodeId, Hello]],
    words: TargetWords | None = None,
) -> str | None:
    """Return why a node does not fit one of the others; None if it fits them all.

    words  the tokenizer of the target that is given to drafters with another one; None: they do
           not fit

    Drafters that fit one target fit each other, except that heads must read the same layers.
    """
    name = node_id.decode(errors="replace")
    for other_id, other in others:
        reason = difference(hello, other, words)
        if reason is None and hello.role is other.role:
            reason = layers_difference(name, hello, other_id.decode(errors="replace"), other)
        if reason is not None:
            return reason
    return None


def difference(hello: Hello, other: Hello, words: TargetWords | None = None) -> str | None:
    """Return why two nodes cannot work on one text, or None (see `layers_difference` too)."""
    if words is None or not _may_translate(hello, other):
        reason = _tokenizer_difference(hello, other)
        if reason is not None:
            return reason
    return _feature_difference(hello, other)


def _may_translate(hello: Hello, other: Hello) -> bool:
    """True if tokenizers may differ: both have one, and none is that of a head."""
    both = (hello, other)
    return all(one.fingerprint.digest and not one.layers for one in both)


def size_difference(words: TargetWords) -> str | None:
    """Return why the target's tokenizer cannot be given to a drafter; None: it can."""
    if len(words.packed) <= MAX_TOKENIZER_BYTES:
        return None
    return (
        "the target's tokenizer is too large to be sent to a drafter that has another; choose a "
        "drafter with the same"
    )


def layers_difference(name: str, hello: Hello, other_name: str, other: Hello) -> str | None:
    """Return why two heads cannot draft for one target (they read different layers), or None."""
    if not hello.layers or not other.layers or hello.layers == other.layers:
        return None
    return (
        f"{name} reads features of layers {_listed(hello.layers)}, {other_name} of layers "
        f"{_listed(other.layers)}; a target hands out those of one kind of heads"
    )


def release_difference(version: int, role: Role) -> str | None:
    """Return why a node with this protocol version is refused, or None."""
    if version == PROTOCOL_VERSION:
        return None
    return (
        f"the {role} speaks protocol version {version}, this coordinator {PROTOCOL_VERSION}; "
        "run the same release on every host"
    )


def replacement_difference(hello: Hello, before: Hello) -> str | None:
    """Return why a new target cannot continue the texts of the one before it, or None.

    Otherwise parts of one text would come from two models. The path of the model may differ,
    because each host has its own.
    """
    if setting := _other_setting(hello, before):
        return (
            f"the texts were begun by a target with another {setting}; start the same model "
            "with the same settings"
        )
    if hello.max_model_len < before.max_model_len:
        return (
            f"the target takes {hello.max_model_len} tokens, the one that began the texts "
            f"{before.max_model_len}; start it with --max-model-len {before.max_model_len}"
        )
    return None


def companion_difference(hello: Hello, name: str, other: Hello) -> str | None:
    """Return why a target cannot share the texts of one coordinator with another one, or None.

    name  of the other target, for people
    """
    if setting := _other_setting(hello, other):
        return f"{name} has another {setting}; start the same model with the same settings"
    if hello.max_model_len < other.max_model_len:
        return (
            f"the target takes {hello.max_model_len} tokens, {name} takes {other.max_model_len}; "
            f"start it with --max-model-len {other.max_model_len}"
        )
    return None


def same_bits(hello: Hello, other: Hello) -> bool:
    """True if two targets are known to compute the same logits, bit for bit.

    That is known of exact targets alone: their digests are made of the number type, of what
    computes the passes, and of logits. Texts of others may differ at near ties.
    """
    return bool(hello.bits) and hello.bits == other.bits


def _other_setting(hello: Hello, before: Hello) -> str:
    """Return in what two targets differ that write texts together, for people; "": in nothing."""
    names = {
        "logits_size": "number of logits",
        "num_parameters": "number of parameters",
        "hidden_size": "hidden size",
        "num_layers": "number of layers",
        "dtype": "number type",
        "home_drafter": "drafter in its process",
    }
    differing = [
        words for name, words in names.items() if getattr(hello, name) != getattr(before, name)
    ]
    mine, theirs = hello.fingerprint, before.fingerprint
    if not mine.is_like(theirs) or mine.eos_ids != theirs.eos_ids:
        differing.insert(0, "tokenizer")
    return differing[0] if differing else ""


def _tokenizer_difference(hello: Hello, other: Hello) -> str | None:
    """Return how two models' tokenizers differ, or None. The padding of the logits may differ."""
    mine, theirs = hello.fingerprint, other.fingerprint
    fix = "choose a drafter with the target's tokenizer"
    if mine.is_like(theirs):
        return None
    if bool(mine.digest) != bool(theirs.digest):
        without = hello if not mine.digest else other
        return f"the {without.role} has no tokenizer.json, the other node has; {fix}"
    who, whom = f"the {hello.role}", f"the {other.role}"
    if hello.role is other.role:
        who, whom = f"this {hello.role}", f"the other {other.role}"
    if mine.vocab_size != theirs.vocab_size:
        return (
            f"{who}'s vocabulary has {mine.vocab_size} tokens, {whom}'s {theirs.vocab_size}; {fix}"
        )
    return (
        f"{who} and {whom} have {mine.vocab_size} tokens each, but the same ids mean "
        f"different tokens; {fix}"
    )


def _feature_difference(hello: Hello, other: Hello) -> str | None:
    """Return why a drafter that is a head cannot read this target's hidden states, or None."""
    if hello.role is other.role:
        return None
    head, target = (other, hello) if hello.role is Role.TARGET else (hello, other)
    fix = "choose the head that was made for this target"
    if not head.layers or target.role is not Role.TARGET:
        return None
    if head.hidden_size != target.hidden_size:
        return (
            f"the drafter is a head for targets whose hidden size is {head.hidden_size}, and this "
            f"one's is {target.hidden_size}; {fix}"
        )
    if max(head.layers) >= target.num_layers:
        return (
            f"the drafter is a head that reads features of layers {_listed(head.layers)}, and the "
            f"target has {target.num_layers} layers; {fix}"
        )
    return None


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
