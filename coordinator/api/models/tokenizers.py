"""Whether two models mean the same by a token id, by their tokenizers alone.

The registry asks the same of the nodes when they introduce themselves: there it is of what was
loaded, here nothing was.
"""

from pathlib import Path

from tokenizers import Tokenizer

from coordinator.api.models.folders import TOKENIZER, Checkpoint
from coordinator.api.models.settings import MODELS
from coordinator.api.tokenization import read_tokenizer
from proto.errors import IncompatibleError, ModelError, shown

OUR_TARGET, OUR_DRAFTER = MODELS / "target", MODELS / "drafter"
FIX = "choose a drafter with the target's tokenizer: --drafter NAME, or --drafter ngram (no model)"


def check_size(model: Checkpoint, like: Checkpoint | None = None) -> None:
    """Raises ModelError if the tokenizer knows more than the model can say.

    like  whose tokenizer is the same, and was read already
    """
    size, tokenizer = model.number("vocab_size"), _tokenizer(like or model)
    if size is None or tokenizer is None:
        return
    num_trained = tokenizer.get_vocab_size(with_added_tokens=False)
    if num_trained > size:
        raise ModelError(
            f"{model.folder / TOKENIZER}: it has {num_trained} tokens, but the model {size} "
            "(vocab_size in config.json); one of the two is of another model"
        )


def check_fit(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raises IncompatibleError if drafts would mean something else to the target, and says how.

    ModelError: as `check_size` of the drafter.
    """
    if _same_bytes(target.folder / TOKENIZER, drafter.folder / TOKENIZER):
        check_size(drafter, like=target)
        return
    check_size(drafter)
    theirs, own = _tokenizer(target), _tokenizer(drafter)
    if theirs is None and own is None:
        sizes = target.number("vocab_size"), drafter.number("vocab_size")
        difference = "" if None in sizes else _sizes_differ(*sizes)
    else:
        difference = _difference(target.name, theirs, drafter.name, own)
    if not difference:
        return
    if drafter.folder.resolve() == OUR_DRAFTER and target.folder.resolve() != OUR_TARGET:
        raise IncompatibleError(
            f"the drafter that comes with Slipstream is for its own target, not for {target.name} "
            f"({difference}); give a small model with that one's tokenizer (--drafter NAME), or "
            "draft without a model (--drafter ngram)"
        )
    raise IncompatibleError(f"{difference}; {FIX}")


def _tokenizer(model: Checkpoint) -> Tokenizer | None:
    path = model.folder / TOKENIZER
    return read_tokenizer(path) if path.exists() else None


def _difference(target: str, theirs: Tokenizer | None, drafter: str, own: Tokenizer | None) -> str:
    """In words; empty: there is none."""
    if theirs is None or own is None:
        without, other = (target, drafter) if theirs is None else (drafter, target)
        return f"{without} has no {TOKENIZER}, and {other} has one"
    if difference := _sizes_differ(theirs.get_vocab_size(), own.get_vocab_size()):
        return difference
    ids, others = own.get_vocab(), theirs.get_vocab()
    if ids == others:
        return ""
    word = min((one for one in others if ids.get(one) != others[one]), key=others.__getitem__)
    number = others[word]
    return (
        f"token {number} is {shown(word)} to {target} and {shown(own.id_to_token(number))} to "
        f"{drafter}"
    )


def _sizes_differ(target: int | None, drafter: int | None) -> str:
    if target == drafter:
        return ""
    return f"the drafter's vocabulary has {drafter} tokens, the target's {target}"


def _same_bytes(one: Path, other: Path) -> bool:
    try:
        if one.stat().st_size != other.stat().st_size:
            return False
        return one.samefile(other) or one.read_bytes() == other.read_bytes()
    except OSError:
        return False
