"""What each model of a pair will take in memory, by its files on this machine.

The arithmetic is the engine's (`stated_sizes.py`), which needs no torch; it is imported when the
first model is looked at.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coordinator.api.models import folders
from coordinator.api.models.heads import find_config, is_whole_model, mtp_bytes
from coordinator.launching.devices import default_device, num_ranks
from proto.errors import ConfigurationError, ModelError
from proto.head_kinds import is_mtp
from proto.messages import Role
from proto.node_config import NodeConfig
from proto.system import is_folder

if TYPE_CHECKING:
    from engine.stated_sizes import How, StatedSizes

UNKNOWN = 1 << 60  # bytes of a device whose memory is not known


def device_of(node: NodeConfig) -> str:
    """Return the device that a node will have, also if the user names none."""
    return node.device or default_device(
        node.role,
        is_alone=False,
        size=node.tensor_parallel_size,
        peer_size=node.peer_size,
        has_peer=node.peer_device is not None or node.fixed_rows > 0,
    )


def sizes_of_node(node: NodeConfig, device_bytes: int = UNKNOWN) -> "StatedSizes":
    """Return what the model of a node will take; `device_bytes` is the memory of its device.

    Raises:
        ModelError: its weights are not here, or a file is damaged.
    """
    how = _how(node, device_bytes)
    if node.role is Role.DRAFTER and node.target:
        return _of_head(node.model, node.revision, node.target, node.target_revision, how)
    return _of_model(node.model, node.revision, how)


def sizes_at_home(node: NodeConfig, device_bytes: int = UNKNOWN) -> "StatedSizes":
    """Return what the drafter in a target's process will take. Raises as `sizes_of_node`."""
    is_model = is_whole_model(node.home_drafter, node.home_revision)
    on_cpu = "fastest" if is_model and device_of(node).startswith("cpu") else ""
    how = replace(
        _how(node, device_bytes),
        dtype=node.home_dtype or on_cpu or (node.dtype if is_model else "auto"),
        num_ranks=1,
        quantization=node.home_quantization if is_model else "",
    )
    if is_model:
        return _of_model(node.home_drafter, node.home_revision, how)
    return _of_head(node.home_drafter, node.home_revision, node.model, node.revision, how)


def weight_bytes_of(node: NodeConfig) -> int:
    """Return the bytes of a node's weights on its device; 0: not known. Fetches nothing."""
    names = [(node.target, node.target_revision)] if node.target else []
    names += [] if is_mtp(node.model) else [(node.model, node.revision)]
    if not all(is_folder(name) or find_config(name, revision) for name, revision in names):
        return 0
    try:
        return sizes_of_node(node).sizes.weights
    except (ModelError, ConfigurationError, OSError):  # whoever checks the node says what is wrong
        return 0


def _how(node: NodeConfig, device_bytes: int) -> "How":
    from engine.stated_sizes import How

    device = device_of(node)
    kind = "cuda" if device.startswith("cuda") else "cpu"
    return How(
        kind,
        device_bytes,
        dtype=(node.dtype_on_cpu if kind == "cpu" else "") or node.dtype,
        num_ranks=num_ranks(device, node.tensor_parallel_size),
        quantization="" if node.target else node.quantization,
        backend=node.backend,
        asked=node.max_model_len,
    )


def _of_model(name: str, revision: str | None, how: "How") -> "StatedSizes":
    from engine.stated_sizes import stated_sizes

    found = folders.find(name, revision)
    assert found.model is not None, "a head has a target"
    return stated_sizes(found.model, how)


def _of_head(
    name: str, revision: str | None, target: str, target_revision: str | None, how: "How"
) -> "StatedSizes":
    """Return what a head will take, or a target's own layer for drafting."""
    from engine.stated_sizes import head_sizes, mtp_sizes

    of_target = _of_model(target, target_revision, how)
    if is_mtp(name):
        of = folders.find(target, target_revision)
        return mtp_sizes(of.text_config, mtp_bytes(target, target_revision), of_target, how)
    head = folders.find(name, revision, is_head=True)
    stated: Mapping[str, Any] = head.stated
    return head_sizes(head.folder, stated, of_target.dtype, how)
