"""Checks devices, folders and tokenizers of a pair before a process is started.

A node would refuse the same settings, but only after seconds or minutes. Only nodes that run on
this machine are checked: nodes on other hosts have devices and folders of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from coordinator.api.config import PairConfig
from coordinator.api.models import folders
from coordinator.api.models.heads import (
    check_head,
    check_mtp,
    find_config,
    is_whole_model,
    kind_of,
    read,
)
from coordinator.api.models.lengths import LENGTHS
from coordinator.api.models.nodes import node_configs
from coordinator.api.models.tokenizers import check_fit, check_size
from coordinator.launching.devices import check_device
from proto.head_kinds import is_mtp, refuse_head
from proto.messages import Role
from proto.node_config import NodeConfig

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
        target, *_ = (node for node in nodes if node.role is Role.TARGET)  # all are alike
        refuse_head(target.model, kind_of(target.model, target.revision))
        self._target = folders.find(target.model, target.revision)
        self._checkpoints = [(Role.TARGET, self._target)]
        self._target.check_quantization(target)
        self._target.check_reproducible(target)
        check_size(self._target)
        for node in [node for node in nodes if node.role is Role.DRAFTER][:1]:
            self._add_drafter(node)
        if target.home_drafter:
            self._add_home_drafter(target)
        for _, checkpoint in self._checkpoints:
            if not checkpoint.is_on_hub:
                checkpoint.check_weights()

    def _add_drafter(self, node: NodeConfig) -> None:
        if node.target:
            self._add_head(Role.DRAFTER, node.model, node.revision)
            return
        drafter = folders.find(node.model, node.revision)
        drafter.check_quantization(node)
        self._checkpoints.append((Role.DRAFTER, drafter))
        check_fit(self._target, drafter, may_differ=self._may_differ)

    def _add_home_drafter(self, node: NodeConfig) -> None:
        if is_whole_model(node.home_drafter, node.home_revision):
            drafter = folders.find(node.home_drafter, node.home_revision)
            drafter.check_quantization(replace(node, quantization=node.home_quantization))
            self._checkpoints.append((Role.TARGET, drafter))
            check_fit(self._target, drafter, may_differ=False)
            return
        self._add_head(Role.TARGET, node.home_drafter, node.home_revision)

    def _add_head(self, role: Role, name: str, revision: str | None) -> None:
        if is_mtp(name):  # in the target's own files
            check_mtp(self._target)
            return
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
    part = {} if path is None else folders.text_part(read(path))
    lengths = [part[field] for field in LENGTHS if type(part.get(field)) is int]
    size = part.get("vocab_size")
    longest = min([config.max_model_len or NO_LIMIT, *lengths])
    return longest, size if type(size) is int else NO_LIMIT
