"""Whether the models of two nodes fit together, by how these introduce themselves (pure).

Each function returns None, or a line that says how they differ and what to do.
"""

from proto.messages import PROTOCOL_VERSION, Hello, Role


def difference(hello: Hello, other: Hello) -> str | None:
    """Why these two cannot work on one text. Of two heads: `layers_difference` as well."""
    return _tokenizer_difference(hello, other) or _feature_difference(hello, other)


def layers_difference(name: str, hello: Hello, other_name: str, other: Hello) -> str | None:
    """Why two drafters cannot work beside each other, if both are heads."""
    if not hello.layers or not other.layers or hello.layers == other.layers:
        return None
    return (
        f"{name} reads features of layers {_listed(hello.layers)}, {other_name} of layers "
        f"{_listed(other.layers)}; a target hands out those of one kind of heads"
    )


def release_difference(version: int, role: Role) -> str | None:
    """Why a node that speaks this version of the protocol cannot be understood."""
    if version == PROTOCOL_VERSION:
        return None
    return (
        f"the {role} speaks protocol version {version}, this coordinator {PROTOCOL_VERSION}; "
        "run the same release on every host"
    )


def replacement_difference(hello: Hello, before: Hello) -> str | None:
    """Why a target cannot go on with the texts of the one that was there before.

    Half of a text would be of another model. A path is no part of it: each host has its own.
    """
    names = {
        "fingerprint": "tokenizer",
        "logits_size": "number of logits",
        "num_parameters": "number of parameters",
        "hidden_size": "hidden size",
        "num_layers": "number of layers",
        "dtype": "number type",
        "heads": "heads",
    }
    for name, words in names.items():
        if getattr(hello, name) != getattr(before, name):
            return (
                f"the texts were begun by a target with another {words}; start the same model "
                "with the same settings"
            )
    if hello.max_model_len < before.max_model_len:
        return (
            f"the target takes {hello.max_model_len} tokens, the one that began the texts "
            f"{before.max_model_len}; start it with --max-model-len {before.max_model_len}"
        )
    return None


def _tokenizer_difference(hello: Hello, other: Hello) -> str | None:
    """How two models' tokenizers differ, or None. A padded tail of the logits may differ."""
    mine, theirs = hello.fingerprint, other.fingerprint
    fix = "choose a drafter with the target's tokenizer"
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
    if mine.digest != theirs.digest:
        return (
            f"{who} and {whom} have {mine.vocab_size} tokens each, but the same ids mean "
            f"different tokens; {fix}"
        )
    return None


def _feature_difference(hello: Hello, other: Hello) -> str | None:
    """Why a drafter that is a head cannot read this target's features, or None."""
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
