"""A tokenizer read from a folder is the one that transformers' AutoTokenizer reads from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoint.tokenizer_files import NAMED, read_tokenizer
from engine.choice.vocabulary import read_vocabulary
from engine.errors import GrammarError, ModelError
from engine.words import TokenizerWords, packed, unpacked
from tests.tiny_tokenizer import padding_to, sentencepiece_tokenizer, truncation_to

MORE = ("<|a|>", "<|b|>", "<|c|>", "the")
TEXTS = (
    "the cat <|a|> is <|b|>, the end",
    " <|c|>the<|a|><|b|> the<s>cat</s>  ",
    "<|end|>text<|pad|> of<|a|>",
    "",
)
File = dict[str, Any]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(
            {sign: i for i, sign in enumerate([*alphabet, "th", "the"])}, [("t", "h"), ("th", "e")]
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece_tokenizer,
}


def described(content: str, **more: Any) -> File:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    return {"content": content, **flags, **more}


def written(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    config: File | None = None,
    names: File | None = None,
    added: File | None = None,
    **changes: Any,
) -> Path:
    """Write the files of a tokenizer; `changes` go into tokenizer.json."""
    folder.mkdir(exist_ok=True)
    files = {
        "config.json": {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()},
        "tokenizer.json": json.loads(tokenizer.to_str()) | changes,
        "tokenizer_config.json": config,
        "special_tokens_map.json": names,
        "added_tokens.json": added,
    }
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def assert_as_transformers(folder: Path) -> None:
    ours, theirs = read_tokenizer(folder).tokenizer, hf.AutoTokenizer.from_pretrained(folder)
    raw = theirs.backend_tokenizer
    assert ours.get_vocab() == theirs.get_vocab()
    added, wanted = (one.get_added_tokens_decoder() for one in (ours, raw))
    assert {i: repr(one) for i, one in added.items()} == {i: repr(t) for i, t in wanted.items()}
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special).ids
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for hides in (False, True):
                decoded = theirs.decode(ids, skip_special_tokens=hides)
                assert ours.decode(ids, skip_special_tokens=hides) == decoded


TRUNCATION, PADDING = truncation_to(4), padding_to(32, "<|pad|>")
SPECIAL, PLAIN = described("<|a|>", special=True), described("<|b|>")
STRIPPED = described("<|c|>", special=True, lstrip=True, rstrip=True)
WITH_TYPE = {"__type": "AddedToken", **described("<|a|>", rstrip=True)}
CASES: dict[str, File] = {
    "tokenizer.json alone": {},
    "truncation": {"truncation": TRUNCATION},
    "padding": {"padding": PADDING},
    "padding, and another pad_token": {"padding": PADDING, "config": {"pad_token": "<|a|>"}},
    "padding, and no pad_token": {"padding": PADDING, "config": {"pad_token": None}},
    "added_tokens_decoder": {
        "config": {"added_tokens_decoder": {"900": SPECIAL, "901": PLAIN, "902": STRIPPED}}
    },
    "ids out of order": {"config": {"added_tokens_decoder": {"902": SPECIAL, "900": PLAIN}}},
    "an empty added_tokens_decoder, and older files": {
        "config": {"added_tokens_decoder": {}},
        "names": {"eos_token": "<|a|>"},
        "added": {"<|b|>": 900},
    },
    "a token of the vocabulary": {
        "config": {"added_tokens_decoder": {"900": described("the", single_word=True)}}
    },
    "flags of a token that tokenizer.json has": {
        "config": {"added_tokens_decoder": {"2": described("<|end|>", lstrip=True)}}
    },
    "eos_token": {"config": {"eos_token": "<|a|>"}},
    "a name with its properties": {"config": {"eos_token": WITH_TYPE}},
    "a name and added_tokens_decoder": {
        "config": {"eos_token": "<|b|>", "added_tokens_decoder": {"900": PLAIN}}
    },
    "a name of its own": {"config": {"image_token": "<|a|>", "bos_token": "<|b|>"}},
    "a name of its own with its properties": {"config": {"image_token": WITH_TYPE}},
    "no text under a name that ends in _token": {"config": {"add_bos_token": True}},
    "additional_special_tokens": {"config": {"additional_special_tokens": ["<|b|>", "<|a|>"]}},
    "extra_special_tokens": {"config": {"extra_special_tokens": ["<|b|>", WITH_TYPE]}},
    "both lists": {
        "config": {"extra_special_tokens": ["<|b|>"], "additional_special_tokens": ["<|a|>"]}
    },
    "named extra tokens": {"config": {"extra_special_tokens": {"image_token": "<|a|>"}}},
    "named extra tokens and a list": {
        "config": {
            "extra_special_tokens": {"image_token": "<|a|>"},
            "additional_special_tokens": ["<|b|>"],
        }
    },
    "special_tokens_map": {"names": {"eos_token": "<|a|>", "pad_token": described("<|b|>")}},
    "special_tokens_map before tokenizer_config": {
        "config": {"eos_token": "<|a|>"},
        "names": {"eos_token": "<|b|>", "video_token": "<|c|>"},
    },
    "special_tokens_map beside added_tokens_decoder": {
        "config": {"added_tokens_decoder": {"900": PLAIN}},
        "names": {"eos_token": "<|a|>"},
    },
    "a list in special_tokens_map": {"names": {"additional_special_tokens": ["<|a|>", "<|b|>"]}},
    "a list in both": {
        "config": {"additional_special_tokens": ["<|a|>"]},
        "names": {"additional_special_tokens": ["<|b|>"]},
    },
    "a newer list in both": {
        "config": {"extra_special_tokens": ["<|a|>"]},
        "names": {"extra_special_tokens": ["<|b|>", "<|a|>", {"content": "<|c|>", "lstrip": True}]},
    },
    "named extra tokens in special_tokens_map": {
        "names": {"extra_special_tokens": {"image_token": "<|a|>"}, "eos_token": "<|b|>"}
    },
    "added_tokens.json": {"added": {"<|b|>": 901, "<|a|>": 900}},
    "added_tokens.json, one named": {
        "added": {"<|b|>": 901, "<|a|>": 900},
        "names": {"eos_token": "<|a|>"},
    },
    "added_tokens.json, one listed": {
        "added": {"<|b|>": 901, "<|a|>": 900},
        "config": {"additional_special_tokens": ["<|b|>"]},
    },
    "added_tokens.json, one listed in special_tokens_map": {
        "added": {"<|b|>": 901, "<|a|>": 900},
        "names": {"additional_special_tokens": ["<|b|>"]},
    },
    "added_tokens.json beside added_tokens_decoder": {
        "added": {"<|b|>": 901},
        "config": {"added_tokens_decoder": {"900": SPECIAL}},
    },
    "split_special_tokens": {"config": {"split_special_tokens": True, "eos_token": "<|a|>"}},
    "what says nothing of tokens": {
        "config": {"add_prefix_space": True, "model_max_length": 4, "truncation_side": "left"}
    },
    "add_bos_token and add_eos_token": {
        "config": {"add_bos_token": False, "add_eos_token": True, "eos_token": "<|a|>"}
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_each_way_of_stating_a_token_is_read_as_transformers_reads_it(
    case: str, kind: str, tmp_path: Path
) -> None:
    assert_as_transformers(written(tmp_path / "model", KINDS[kind](), **CASES[case]))


contents = st.sampled_from(MORE)
flags = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
)
objects = st.builds(lambda content, more: {"content": content, **more}, contents, flags)
# transformers takes no `special` in an object of a list of special_tokens_map.json.
in_lists = objects.map(lambda one: {key: it for key, it in one.items() if key != "special"})
with_type = objects.map(lambda one: {"__type": "AddedToken", **one})
tokens = st.one_of(contents, with_type)
names = st.sampled_from((*NAMED[:4], "image_token", "audio_token"))
lists = st.lists(tokens, max_size=3)
named = st.dictionaries(names, tokens, max_size=3)
by_id = st.dictionaries(st.integers(250, 990).map(str), objects, max_size=3)
configs = st.builds(
    lambda *parts: {key: one for part in parts for key, one in part.items()},
    named,
    st.fixed_dictionaries(
        {},
        optional={
            "additional_special_tokens": lists,
            "extra_special_tokens": st.one_of(lists, named),
            "added_tokens_decoder": by_id,
            "split_special_tokens": st.booleans(),
        },
    ),
)
maps = st.builds(
    lambda *parts: {key: one for part in parts for key, one in part.items()},
    st.dictionaries(names, st.one_of(contents, objects), max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "additional_special_tokens": st.lists(contents, max_size=2),
            "extra_special_tokens": st.lists(st.one_of(contents, in_lists), max_size=2),
        },
    ),
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    config=st.none() | configs,
    map_=st.none() | maps,
    added=st.none() | st.dictionaries(contents, st.integers(250, 990), max_size=3),
)
def test_any_files_together_are_read_as_transformers_reads_them(
    kind: str, config: File | None, map_: File | None, added: File | None, tmp_path: Path
) -> None:
    folder = written(tmp_path / "m", KINDS[kind](), config=config, names=map_, added=added)
    assert_as_transformers(folder)


def test_the_tokens_of_tokenizer_json_alone_have_a_digest_of_their_own(tmp_path: Path) -> None:
    bare = read_tokenizer(written(tmp_path / "bare", byte_level()))
    more = read_tokenizer(written(tmp_path / "more", byte_level(), config={"eos_token": "<|a|>"}))
    assert bare.digests() == {bare.digest()}
    assert more.digests() == {more.digest(), bare.digest()}
    assert more.further == {"<|a|>"}
    assert more.is_like(bare)
    assert bare.is_like(more)


def test_a_token_of_the_vocabulary_is_no_further_one(tmp_path: Path) -> None:
    read = read_tokenizer(written(tmp_path / "model", byte_level(), config={"eos_token": "the"}))
    assert read.tokenizer.get_added_tokens_decoder()[257].special
    assert read.further == frozenset()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config": {"eos_token": 5}}, "tokenizer_config.json: eos_token has 5, which is no token"),
        ({"names": {"eos_token": []}}, "special_tokens_map.json: eos_token has [], which is no"),
        ({"config": {"added_tokens_decoder": []}}, "added_tokens_decoder is []; it must be an"),
        ({"config": {"added_tokens_decoder": {"x": SPECIAL}}}, '"x" is no token id'),
        ({"config": {"added_tokens_decoder": {"9": {"content": 1}}}}, "which is no token"),
        ({"config": {"added_tokens_decoder": {"9": "a"}}}, 'has "a"; it must be an object'),
        ({"config": {"extra_special_tokens": 3}}, "extra_special_tokens is 3; it must be a list"),
        ({"added": {"<|a|>": None}}, "added_tokens.json: null is no token id"),
    ],
)
def test_what_is_no_token_is_refused_in_one_line(files: File, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refusal:
        read_tokenizer(written(tmp_path / "model", byte_level(), **files))
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_dropout_makes_no_prompt_random(tmp_path: Path) -> None:
    model = json.loads(byte_level().to_str())["model"] | {"dropout": 0.9}
    found = read_tokenizer(written(tmp_path / "model", byte_level(), model=model)).tokenizer
    assert {tuple(found.encode("the the the").ids) for _ in range(20)} == {
        tuple(byte_level().encode("the the the").ids)
    }


def test_where_a_class_builds_the_tokenizer_anew_tokenizer_json_counts(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|a|>"}
    folder = written(tmp_path / "model", sentencepiece_tokenizer(), config=config)
    ours, theirs = read_tokenizer(folder).tokenizer, sentencepiece_tokenizer()
    text = "the cat is of a text"
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.encode("<|a|>").ids == [1, theirs.get_vocab_size()]


def test_a_drafter_of_another_vocabulary_sees_the_same_tokens(tmp_path: Path) -> None:
    for splits in (False, True):
        config = {"eos_token": "<|a|>", "split_special_tokens": splits}
        here = read_tokenizer(written(tmp_path / "m", byte_level(), config=config)).tokenizer
        there = unpacked(packed(here))
        assert [there.encode(text).ids for text in TEXTS] == [
            here.encode(text).ids for text in TEXTS
        ]
        assert TokenizerWords(there).specials == {258: "<|end|>", 259: "<|a|>"}


def test_grammars_see_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    folder = written(tmp_path / "model", byte_level(), config={"eos_token": "<|a|>"})
    whole = read_vocabulary(folder)
    assert whole is not None
    whole.matcher("start: <|a|>")
    bare = read_vocabulary(written(folder, byte_level()))
    assert bare is not None
    with pytest.raises(GrammarError):
        bare.matcher("start: <|a|>")
