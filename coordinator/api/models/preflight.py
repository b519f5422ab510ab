"""Checks devices, folders and tokenizers of a pair before a process is started.

A node would refuse the same settings, but only after seconds or minutes. Only nodes that run on
this machine are checked: nodes on other hosts have devices and folders of their own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from coordinator.api.config import PairConfig
from coordinator.api.models import folders
from coordinator.api.models.folders import TOKENIZER, Checkpoint
from coordinator.api.models.heads import check_head, find_config, kind_of, read
from coordinator.api.models.lengths import LENGTHS
from coordinator.api.models.nodes import node_configs
from coordinator.api.prompts import read_tokenizer
from coordinator.launching.devices import check_device
from engine.words import TokenizerWords, UnknownKind, shared
from proto.errors import IncompatibleError, ModelError, shown
from proto.installation import MODELS
from proto.messages import Role
from proto.node_config import NodeConfig

# -- tokenizers ------------------------------------------------------------------------------------

# Checks that two models have the same token ids, by their tokenizer files alone.
#
# The registry checks this again, with what the nodes report of the models that they have loaded.

OUR_TARGET, OUR_DRAFTER = MODELS / "target", MODELS / "drafter"
FIX = "choose a drafter with the target's tokenizer: --drafter NAME, or --drafter ngram (no model)"


def check_size(model: Checkpoint, like: Checkpoint | None = None) -> None:
    """Raise ModelError if the tokenizer has more tokens than the model's vocabulary.

    like  another model with the same tokenizer file, which was read already
    """
    size, tokenizer = model.number("vocab_size"), _tokenizer(like or model)
    if size is None or tokenizer is None:
        return
    num_trained = tokenizer.get_vocab_size(with_added_tokens=False)
    if num_trained > size:
        raise ModelError(
            f"{model.folder / TOKENIZER}: it has {num_trained} tokens, but the model {size} "
            "(vocab_size in config.json); they are of two models"
        )


def check_fit(target: Checkpoint, drafter: Checkpoint, *, may_differ: bool) -> None:
    """Raise IncompatibleError if the tokenizers of target and drafter do not fit together.

    may_differ  True: another tokenizer fits too, if its tokens can be translated

    The error says the difference. Raises ModelError if `check_size` of the drafter does.
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
            f"({difference}); {FIX}"
        )
    if not may_differ or theirs is None or own is None:
        raise IncompatibleError(f"{difference}; {FIX}")
    if (reason := _why_untranslatable(own, theirs)) is not None:
        raise IncompatibleError(f"{reason}; {FIX}")


def _why_untranslatable(own: Tokenizer, target: Tokenizer) -> str | None:
    """Return why what a drafter says cannot be said in the target's tokens; None: it can."""
    try:
        found = shared(TokenizerWords(own), TokenizerWords(target))
    except UnknownKind:
        return "drafter and target have different tokenizers, of which one is of a rare kind"
    if not found.sample:
        return "the drafter's tokenizer shares no token with the target's in a sample text"
    return None


def _tokenizer(model: Checkpoint) -> Tokenizer | None:
    path = model.folder / TOKENIZER
    return read_tokenizer(path) if path.exists() else None


def _difference(target: str, theirs: Tokenizer | None, drafter: str, own: Tokenizer | None) -> str:
    """Return the difference of two tokenizers in words; "" if there is none."""
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


# -- preflight -------------------------------------------------------------------------------------

NO_LIMIT = 1 << 31
Say = Callable[[dict[Role, str]], None]


class Preflight:
    """The checked devices and folders of the models that the nodes will load.

    The constructor checks them. It raises ConfigurationError, ModelError or IncompatibleError.
    """

    def __init__(self, nodes: Sequence[NodeConfig], *, may_differ: bool = False) -> None:
        """Look at what these nodes would load; `may_differ` as for `check_fit`."""
        self._may_differ = may_differ
        for node in nodes:
            check_device(node.role, node.device, node.tensor_parallel_size)
        (target,) = (node for node in nodes if node.role is Role.TARGET)
        self._target = folders.find(target.model, target.revision)
        self._checkpoints = [(Role.TARGET, self._target)]
        check_size(self._target)
        for node in nodes:
            if node.role is Role.DRAFTER:
                self._add_drafter(node)
        if target.heads:
            self._add_head(Role.TARGET, target.heads, target.heads_revision)
        for _, checkpoint in self._checkpoints:
            if not checkpoint.is_on_hub:
                checkpoint.check_weights()

    def _add_drafter(self, node: NodeConfig) -> None:
        if node.target:
            self._add_head(Role.DRAFTER, node.model, node.revision)
            return
        drafter = folders.find(node.model, node.revision)
        self._checkpoints.append((Role.DRAFTER, drafter))
        check_fit(self._target, drafter, may_differ=self._may_differ)

    def _add_head(self, role: Role, name: str, revision: str | None) -> None:
        head = folders.find(name, revision, is_head=True)
        self._checkpoints.append((role, head))
        check_head(head, kind_of(name, revision), self._target)

    def fetch(self, say: Say | None) -> None:
        """Download and check the weights of models on the hub. Raises ModelError.

        say  called with the progress of the download, by the role of the node that it is for
        """
        for role, checkpoint in self._checkpoints:
            if checkpoint.is_on_hub:
                checkpoint.fetch_weights(say and partial(_say_of, say, role))
                checkpoint.check_weights()
        if say is not None:
            say({})  # no download runs now, and no node was started yet


def look_at(config: PairConfig, *, drafts: bool) -> Preflight:
    """Check what the nodes of a pair would load; return it. Raises as `Preflight` does.

    drafts  as for `node_configs`
    """
    nodes = node_configs(config, endpoint="", outside="", secret="", drafts=drafts)
    return Preflight(nodes, may_differ=not config.require_same_tokenizer)


def _say_of(say: Say, role: Role, words: str) -> None:
    say({role: words})


def known_limits(config: PairConfig) -> tuple[int, int]:
    """Return (most tokens of a text, size of the vocabulary) by the target's config.json.

    A limit that it does not state is NO_LIMIT; the target itself may take less.
    """
    path = find_config(config.target, config.target_revision)
    stated = {} if path is None else read(path)
    inner = stated.get("text_config")
    part = inner if isinstance(inner, dict) else stated
    lengths = [part[field] for field in LENGTHS if type(part.get(field)) is int]
    size = part.get("vocab_size")
    longest = min([config.max_model_len or NO_LIMIT, *lengths])
    return longest, size if type(size) is int else NO_LIMIT
