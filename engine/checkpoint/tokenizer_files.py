"""Reads a model's tokenizer: tokenizer.json, and the tokens that only the files beside it state.

The yardstick is transformers' AutoTokenizer, where it takes tokenizer.json as it is. Where a class
of transformers builds the tokenizer anew instead (Gemma, Qwen2), tokenizer.json counts here too.

Theory of operation
-------------------
Tokens are stated in four places, and each token that tokenizer.json lacks is added behind its own:

    tokenizer_config.json    under `added_tokens_decoder`; under names that end in `_token`, such as
                             `eos_token`; in lists (`additional_special_tokens`, which newer files
                             call `extra_special_tokens`)
    special_tokens_map.json  names and lists, which go before those of tokenizer_config.json
    added_tokens.json        token -> id
    tokenizer.json           `pad_token` of its padding, if no other is stated

The two files in the middle count only where tokenizer_config.json has no `added_tokens_decoder`.
The ids that the files state decide the order of the tokens that they add, not their ids: each gets
the next free one. A token that the vocabulary has already keeps its id.

Truncation, padding and dropout in tokenizer.json are for training, and are switched off: a prompt
is neither cut nor filled, and one text always has the same tokens. This is done here, once. A
tokenizer is never changed after it was read, since other threads may be using it.

Needs no torch: the coordinator reads tokenizers with it as well as the nodes.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from engine.checkpoint.files import Object, as_json, one_line, read_object, refuse_odd_file
from engine.errors import ModelError

TOKENIZER = "tokenizer.json"
CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES = (TOKENIZER, CONFIG, NAMES, ADDED)
# The special tokens that transformers gives names, in its order.
NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
LIST, OLD_LIST = "extra_special_tokens", "additional_special_tokens"
BY_ID = "added_tokens_decoder"

_PROPERTIES = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

Token = str | AddedToken


@dataclass(frozen=True, slots=True)
class ReadTokenizer:
    """A tokenizer as the files of its folder state it.

    further  the tokens that are not in tokenizer.json but got an id behind those that are
    """

    tokenizer: Tokenizer
    further: frozenset[str]

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the id -> token map."""
        return self._digest_without(())

    def file_digest(self) -> str:
        """Return the same of tokenizer.json alone; "" if no other file adds a token."""
        return self._digest_without(self.further) if self.further else ""

    def digests(self) -> frozenset[str]:
        """Return both, as `Fingerprint.digests` does."""
        return frozenset((self.digest(), self.file_digest())) - {""}

    def _digest_without(self, left_out: Collection[str]) -> str:
        vocabulary = self.tokenizer.get_vocab().items()
        pairs = sorted((id_, token) for token, id_ in vocabulary if token not in left_out)
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def is_like(self, other: "ReadTokenizer") -> bool:
        """True if token ids mean the same to both, as `Fingerprint.is_like` has it."""
        return any(mine == theirs for mine in self.maps() for theirs in other.maps())

    def maps(self) -> tuple[dict[str, int], ...]:
        """Return the token -> id map, and that of tokenizer.json alone if it is another."""
        whole = self.tokenizer.get_vocab()
        if not self.further:
            return (whole,)
        return whole, {token: id_ for token, id_ in whole.items() if token not in self.further}


def read_tokenizer(folder: Path) -> ReadTokenizer:
    """Read and return the tokenizer in a model's folder. Raises ModelError."""
    path = folder / TOKENIZER
    refuse_odd_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ModelError(f"{path}: cannot be read: {one_line(error)}; get it again") from error
    stated = read_stated(folder)
    if tokenizer.padding is not None:
        stated.names.setdefault("pad_token", tokenizer.padding["pad_token"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    tokenizer.encode_special_tokens = stated.are_split
    tokens = _to_add(tokenizer.get_added_tokens_decoder(), stated)
    new = [token.content for token in tokens if tokenizer.token_to_id(token.content) is None]
    tokenizer.add_tokens(tokens)
    further = frozenset(one for one in new if tokenizer.token_to_id(one) is not None)
    return ReadTokenizer(tokenizer, further)


def refuse_too_many(path: Path, num_trained: int, size: int) -> None:
    """Raise ModelError if a tokenizer has more tokens than the model's vocabulary.

    path         that of tokenizer.json, for messages
    num_trained  its tokens without those that were added later: a model may lack the latter
    size         the model's logits
    """
    if num_trained > size:
        raise ModelError(
            f"{path}: it has {num_trained} tokens, but the model {size} (vocab_size in "
            "config.json); they are of two models"
        )


def _to_add(known: Mapping[int, AddedToken], stated: "Stated") -> list[AddedToken]:
    """Return the tokens to add, in this order, to a tokenizer whose added tokens are `known`.

    Among them are tokens that it has, if they are not added ones yet or the files state other
    properties of them.
    """
    pairs = stated.added if stated.is_whole else [*stated.added, *known.items()]
    by_id, by_content = dict(pairs), {token.content: token for _, token in pairs}
    names: dict[str, Token | None] = dict.fromkeys(NAMED) | stated.names
    for name in NAMED:
        if (token := names.get(name)) is not None:
            names[name] = by_content.get(str(token), token)
    names |= stated.own
    present = {repr(token) for token in known.values()}
    wanted: list[Token] = [one for _, one in sorted(by_id.items()) if repr(one) not in present]
    contents = {token.content for token in known.values()}.union(map(str, wanted))
    for token in (*names.values(), *stated.listed):
        if token is not None and str(token) not in contents and token not in wanted:
            wanted.append(token)
    named = {str(token) for token in names.values() if token is not None}
    return [_added(token, is_named=str(token) in named) for token in wanted]


def changed_ns(folder: Path) -> tuple[int, ...]:
    """Return when each of the files was changed, in ns; 0: there is none. For keys of caches."""
    times = []
    for name in FILES:
        try:
            times.append((folder / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


# -- what the files state --------------------------------------------------------------------------


@dataclass(slots=True)
class Stated:
    """What the files beside a tokenizer.json state of tokens.

    names, own  special tokens by name (`_Found`); None: there is none
    listed     special tokens without a name
    added      added tokens, each behind the id that a file states
    is_whole   True: there is `added_tokens_decoder`, so that the two older files do not count
    are_split  True: special tokens in a text are read as any other text (`split_special_tokens`)
    """

    names: dict[str, Token | None]
    own: dict[str, Token]
    listed: list[Token]
    added: list[tuple[int, AddedToken]]
    is_whole: bool
    are_split: bool


def read_stated(folder: Path) -> Stated:
    """Return what the files beside a tokenizer.json state. Raises ModelError."""
    path = folder / CONFIG
    config = _object(path)
    if OLD_LIST in config and not config.get(LIST):
        config[LIST] = config.pop(OLD_LIST)
    found = _tokens_in(path, config)
    is_whole = config.get(BY_ID) is not None
    if is_whole:
        added = _by_id(path, config[BY_ID])
    else:
        older = folder / NAMES
        special = _merge(found, _tokens_in(older, _object(older), are_special=True))
        added = _of_added_file(folder / ADDED, special)
    listed = found.lists[LIST] if LIST in found.lists else found.lists.get(OLD_LIST, [])
    return Stated(
        names=found.names,
        own=found.own,
        listed=listed,
        added=added,
        is_whole=is_whole,
        are_split=bool(config.get("split_special_tokens")),
    )


@dataclass(slots=True)
class _Found:
    """The special tokens in one file.

    names  those of NAMED, and others that the file describes by their properties
    own    those under other names, of which it gives the text
    lists  those without a name, by the name of the list
    """

    names: dict[str, Token | None] = field(default_factory=dict)
    own: dict[str, Token] = field(default_factory=dict)
    lists: dict[str, list[Token]] = field(default_factory=dict)


def _tokens_in(path: Path, content: Object, *, are_special: bool = False) -> _Found:
    """Return the special tokens in a file.

    are_special  it is special_tokens_map.json, where each token with its properties is special
    """
    found = _Found()
    for name, value in content.items():
        # In tokenizer_config.json an object under another name may be anything.
        is_other = isinstance(value, dict) and value.get("__type") != "AddedToken"
        if name in (LIST, OLD_LIST):
            _take_list(path, found, name, value, are_special=are_special)
        elif name in NAMED:
            token = None if value is None else _token(path, name, value, are_special=are_special)
            found.names[name] = token
        elif name.endswith("_token") and isinstance(value, dict) and (are_special or not is_other):
            found.names[name] = _token(path, name, value, are_special=are_special)
        elif name.endswith("_token") and isinstance(value, str):
            (found.names if are_special else found.own)[name] = value
    return found


def _take_list(path: Path, found: _Found, name: str, value: object, *, are_special: bool) -> None:
    """Put the tokens of a list, or of an object of named tokens, where they belong."""
    if isinstance(value, dict):
        found.own |= {one: _token(path, name, token) for one, token in value.items()}
    elif value is None or isinstance(value, list):
        tokens = [_token(path, name, token, are_special=are_special) for token in value or ()]
        found.lists[name] = tokens
    else:
        raise ModelError(f"{path}: {name} is {as_json(value)}; it must be a list of tokens")


def _merge(found: _Found, newer: _Found) -> set[str]:
    """Add the tokens in special_tokens_map.json, which go before those in tokenizer_config.json.

    Returns the texts of those tokens by which added_tokens.json knows that a token is special:
    transformers leaves out the older list, and what tokenizer_config.json gives with properties.
    """
    found.names |= newer.names
    found.own |= newer.own
    if OLD_LIST in newer.lists:
        found.lists[OLD_LIST] = newer.lists[OLD_LIST]
    listed = newer.lists.get(LIST)
    if listed is not None:
        before = found.lists.get(LIST, [])
        found.lists[LIST] = [*before, *(token for token in listed if token not in before)]
    known: set[str] = set()
    for name in NAMED:
        token = found.names.get(name)
        if isinstance(token, str) or (token is not None and name in newer.names):
            known.add(str(token))
    texts = (one for one in found.lists.get(LIST, ()) if isinstance(one, str))
    return known.union(texts, map(str, listed or ()))


def _of_added_file(path: Path, special: set[str]) -> list[tuple[int, AddedToken]]:
    """Return the tokens in added_tokens.json; those of `special` are special."""
    return [
        (_id(path, id_), AddedToken(one, normalized=one not in special, special=one in special))
        for one, id_ in _object(path).items()
    ]


def _by_id(path: Path, stated: object) -> list[tuple[int, AddedToken]]:
    """Return the tokens of `added_tokens_decoder`."""
    if not isinstance(stated, dict):
        raise ModelError(f"{path}: {BY_ID} is {as_json(stated)}; it must be an object")
    found = []
    for id_, described in stated.items():
        token = _token(path, BY_ID, described)
        if isinstance(token, str):
            raise ModelError(f"{path}: {BY_ID} has {as_json(token)}; it must be an object")
        found.append((_id(path, id_), token))
    return found


def _added(token: Token, *, is_named: bool) -> AddedToken:
    """Return a token as it is added; one with a name is special."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if is_named:
        token.special = True
    return token


# -- reading ---------------------------------------------------------------------------------------


def _object(path: Path) -> Object:
    """Return the content of a JSON file; {} if there is none."""
    refuse_odd_file(path)
    return read_object(path) if path.exists() else {}


def _token(path: Path, name: str, value: object, *, are_special: bool = False) -> Token:
    """Return a token that a file gives as text or as an object with its properties.

    are_special  a token with properties is special whatever they say
    """
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, dict):
            given: dict[str, Any] = {key: one for key, one in value.items() if key in _PROPERTIES}
            return AddedToken(**given | ({"special": True} if are_special else {}))
    except TypeError:
        pass
    raise ModelError(f"{path}: {name} has {as_json(value)}, which is no token; get it again")


def _id(path: Path, value: object) -> int:
    """Return a token id that a file gives as a number or, in a key, as text."""
    try:
        if type(value) in (int, str):
            return int(value)  # type: ignore[call-overload, no-any-return]
    except ValueError:
        pass
    raise ModelError(f"{path}: {as_json(value)} is no token id; get it again")
