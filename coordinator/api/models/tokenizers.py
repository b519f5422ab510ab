"""Checks that the tokenizers of two models fit together, by their files alone.

The registry checks this again, with what the nodes report of the models that they have loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from coordinator.api.models import folders
from coordinator.api.models.folders import TOKENIZER, Checkpoint
from proto.errors import IncompatibleError, shown
from proto.installation import MODELS
from proto.system import is_folder

if TYPE_CHECKING:
    from engine.checkpoint.tokenizer_files import ReadTokenizer

OUR_TARGET, OUR_DRAFTER = MODELS / "target", MODELS / "drafter"
FIX = "choose a drafter with the target's tokenizer: --drafter NAME, or --drafter ngram (no model)"


def has_our_tokenizer(folder: Path) -> bool:
    """True if a target's tokenizer is that of the drafter that comes with Slipstream."""
    return _same_bytes(folder / TOKENIZER, OUR_DRAFTER / TOKENIZER)


def check_size(model: Checkpoint, like: Checkpoint | None = None) -> None:
    """Raise ModelError if the tokenizer has more tokens than the model's vocabulary.

    like  another model with the same tokenizer file, which was read already
    """
    size, tokenizer = model.number("vocab_size"), _tokenizer(like or model)
    if size is None or tokenizer is None:
        return
    from engine.checkpoint.tokenizer_files import refuse_too_many

    num_trained = tokenizer.tokenizer.get_vocab_size(with_added_tokens=False)
    refuse_too_many(model.folder / TOKENIZER, num_trained, size)


def check_fit(target: Checkpoint, drafter: Checkpoint, *, may_differ: bool) -> None:
    """Raise IncompatibleError if the tokenizers of target and drafter do not fit together.

    may_differ  True: another tokenizer fits too, if its tokens can be translated

    The error says the difference. Raises ModelError if `check_size` of the drafter does.
    """
    if _same_bytes(target.folder / TOKENIZER, drafter.folder / TOKENIZER):
        # Whatever tokens the files beside them add, these two fit (`Fingerprint.is_like`).
        folders.check_beside_tokenizer(drafter.folder)
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
            f"({difference}); {FIX}"
        )
    if not may_differ or theirs is None or own is None:
        raise IncompatibleError(f"{difference}; {FIX}")
    if (reason := _why_untranslatable(own.tokenizer, theirs.tokenizer)) is not None:
        raise IncompatibleError(f"{reason}; {FIX}")


def _why_untranslatable(own: Tokenizer, target: Tokenizer) -> str | None:
    """Return why what a drafter says cannot be said in the target's tokens; None: it can."""
    from engine.words import TokenizerWords, UnknownKind, shared  # most pairs need none of it

    try:
        found = shared(TokenizerWords(own), TokenizerWords(target))
    except UnknownKind:
        return "drafter and target have different tokenizers, of which one is of a rare kind"
    if not found.sample:
        return "the drafter's tokenizer shares no token with the target's in a sample text"
    return None


def _tokenizer(model: Checkpoint) -> "ReadTokenizer | None":
    has_one = (model.folder / TOKENIZER).exists()
    return folders.read_tokenizer(model.folder) if has_one else None


def _difference(
    target: str, theirs: "ReadTokenizer | None", drafter: str, own: "ReadTokenizer | None"
) -> str:
    """Return the difference of two tokenizers in words; "" if there is none."""
    if theirs is None or own is None:
        without, other = (target, drafter) if theirs is None else (drafter, target)
        return f"{without} has no {TOKENIZER}, and {other} has one"
    if own.is_like(theirs):
        return ""
    ids, others = own.tokenizer.get_vocab(), theirs.tokenizer.get_vocab()
    if difference := _sizes_differ(len(others), len(ids)):
        return difference
    word = min((one for one in others if ids.get(one) != others[one]), key=others.__getitem__)
    number = others[word]
    said = shown(own.tokenizer.id_to_token(number))
    return f"token {number} is {shown(word)} to {target} and {said} to {drafter}"


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


def differ(target: str, drafter: str) -> bool:
    """True if two folders are known to have different tokenizers; False for names on the hub."""
    if not is_folder(target) or not is_folder(drafter):
        return False
    models = [folders.find(name, None) for name in (target, drafter)]
    theirs, own = (_tokenizer(model) for model in models)
    if theirs is None or own is None:
        return False
    return bool(_difference(models[0].name, theirs, models[1].name, own))
