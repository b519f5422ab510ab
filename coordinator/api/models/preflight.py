"""All that can be known of a pair before a process is started: its devices, folders, tokenizers.

What is refused here would be refused by a node too, after seconds or minutes. Only nodes that run
on this machine are looked at: others have devices and folders of their own.
"""

from collections.abc import Callable, Sequence
from functools import partial

from coordinator.api.config import PairConfig
from coordinator.api.models import folders, tokenizers
from coordinator.api.models.head_fit import check_head
from coordinator.api.models.heads import find_config, kind_of, read
from coordinator.api.models.lengths import LENGTHS
from coordinator.api.models.nodes import node_configs
from coordinator.launching.devices import check_device
from proto.messages import Role
from proto.node_config import NodeConfig

NO_LIMIT = 1 << 31
Say = Callable[[dict[Role, str]], None]


class Preflight:
    """What the nodes would load.

    Raises on construction ConfigurationError, ModelError, IncompatibleError.
    """

    def __init__(self, nodes: Sequence[NodeConfig]) -> None:
        for node in nodes:
            check_device(node.role, node.device, node.tensor_parallel_size)
        (target,) = (node for node in nodes if node.role is Role.TARGET)
        self._target = folders.find(target.model, target.revision)
        self._checkpoints = [(Role.TARGET, self._target)]
        tokenizers.check_size(self._target)
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
        tokenizers.check_fit(self._target, drafter)

    def _add_head(self, role: Role, name: str, revision: str | None) -> None:
        head = folders.find(name, revision, is_head=True)
        self._checkpoints.append((role, head))
        check_head(head, kind_of(name, revision), self._target)

    def fetch(self, say: Say | None) -> None:
        """Fetch the weights of models on the hub, and look at them. Raises ModelError.

        say  is told for which node what is fetched, how much of it, and how fast
        """
        for role, checkpoint in self._checkpoints:
            if checkpoint.is_on_hub:
                checkpoint.fetch_weights(say and partial(_say_of, say, role))
                checkpoint.check_weights()
        if say is not None:
            say({})  # none of them has been started


def look_at(config: PairConfig, *, drafts: bool) -> Preflight:
    """At what the nodes of a pair would load. Raises as `Preflight` does.

    drafts  as for `node_configs`
    """
    return Preflight(node_configs(config, endpoint="", outside="", secret="", drafts=drafts))


def _say_of(say: Say, role: Role, words: str) -> None:
    say({role: words})


def known_limits(config: PairConfig) -> tuple[int, int]:
    """Most tokens of a text, and tokens of the vocabulary, by what the target's config.json holds.

    What it does not say is no limit; the target itself may take less.
    """
    path = find_config(config.target, config.target_revision)
    stated = {} if path is None else read(path)
    inner = stated.get("text_config")
    part = inner if isinstance(inner, dict) else stated
    lengths = [part[field] for field in LENGTHS if type(part.get(field)) is int]
    size = part.get("vocab_size")
    longest = min([config.max_model_len or NO_LIMIT, *lengths])
    return longest, size if type(size) is int else NO_LIMIT
