"""Makes the configs that the nodes of a pair are started with."""

import os
from dataclasses import replace

from coordinator.api.config import REPRODUCIBLE_ROWS, PairConfig
from coordinator.api.models.folders import weight_bytes
from coordinator.api.models.heads import find_config, is_whole_model
from coordinator.api.models.sizes import weight_bytes_of
from coordinator.launching.devices import default_shares, shares
from proto.messages import MAX_SESSIONS, Role
from proto.node_config import NodeConfig
from proto.system import is_folder, path_of

FASTEST = "fastest"
KEEP_SPEEDS = "SLIPSTREAM_KEEP_SPEEDS"  # this environment variable, if 0, switches that off
# How a head's matrices are rounded on a CPU unless somebody says otherwise: its drafts are nearly
# as often right, and a step reads a quarter of the bytes (docs/LOG.md).
OF_A_HEAD = "int4"


def node_configs(
    config: PairConfig, *, endpoint: str, outside: str, secret: str, drafts: bool
) -> list[NodeConfig]:
    """Return the configs of targets, and of drafters if drafts come from processes of their own.

    endpoint, outside  where the coordinator listens, for nodes of this host and of others
    secret             shows that a node was started for this coordinator
    drafts             False: the target decodes alone, and loads no drafter either
    """
    has_drafter = drafts and config.has_draft_process
    target = _target(config, endpoint, outside, secret, drafts=drafts)
    drafter = _drafter(config, endpoint, outside, secret) if has_drafter else None
    of_target = weight_bytes_of(target) or _file_bytes(config.target, config.target_revision)
    if drafter is None:
        target = replace(target, target_bytes=of_target if target.home_drafter else 0)
    else:
        of_drafter = weight_bytes_of(drafter)
        of_drafter = of_drafter or _file_bytes(config.drafter, config.drafter_revision)
        target = replace(target, peer_bytes=of_drafter)
        drafter = replace(drafter, peer_bytes=of_target)
    if config.has_several:
        return _several(config, target, drafter)
    return [target] if drafter is None else [target, drafter]


def _several(
    config: PairConfig, target: NodeConfig, drafter: NodeConfig | None
) -> list[NodeConfig]:
    """Return the configs of several nodes, each with its name and its share of the devices."""
    num_drafters = 0 if drafter is None else config.drafters
    ranks = config.ranks
    targets, drafters = default_shares(
        config.targets, num_drafters, ranks[Role.TARGET], ranks[Role.DRAFTER]
    )
    if config.target_device:
        targets = shares(Role.TARGET, config.target_device, config.targets)
    if config.drafter_device:
        drafters = shares(Role.DRAFTER, config.drafter_device, config.drafters)
    beside = None if drafter is None else ",".join(drafters)
    made = [
        replace(target, identity=f"target-{number}", device=device, peer_device=beside)
        for number, device in enumerate(targets, 1)
    ]
    if drafter is None:
        return made
    # Every drafter drafts for the texts of all targets.
    room = min(MAX_SESSIONS, config.num_seqs * config.targets)
    drafter = replace(drafter, max_num_seqs=room, peer_device=",".join(targets))
    return made + [
        replace(drafter, identity=f"drafter-{number}", device=device)
        for number, device in enumerate(drafters, 1)
    ]


def _file_bytes(model: str, revision: str | None) -> int:
    """Return the size of a model's weights by its files on this machine; 0: not known."""
    folder = path_of(model) if is_folder(model) else None  # one of GGUF files has no config.json
    if folder is None and (config := find_config(model, revision)) is not None:
        folder = config.parent
    try:
        return 0 if folder is None else weight_bytes(folder)
    except OSError:  # a link to nowhere: the node says what is wrong
        return 0


def _target(
    config: PairConfig, endpoint: str, outside: str, secret: str, *, drafts: bool
) -> NodeConfig:
    name, revision = (config.home_drafter if drafts else None) or ("", None)
    is_model = bool(name) and is_whole_model(name, revision)
    return NodeConfig(
        role=Role.TARGET,
        endpoint=endpoint,
        identity="target-1",
        secret=secret,
        model=config.target,
        revision=config.target_revision,
        dtype=config.dtype,
        device=config.target_device,
        tensor_parallel_size=config.tensor_parallel_size,
        peer_size=config.ranks[Role.DRAFTER],
        peer_device=config.drafter_device if drafts and config.has_draft_process else None,
        placement=config.placement,
        outside=outside,
        max_model_len=config.asked_len,
        backend=config.backend,
        busy_poll_us=config.busy_poll_us,
        max_num_seqs=config.num_seqs,
        fixed_rows=REPRODUCIBLE_ROWS if config.reproducible else 0,
        simulated_ms=config.simulate_target_ms,
        simulated_ms_per_row=config.simulate_target_ms_per_row,
        home_drafter=name,
        home_revision=revision,
        home_dtype=config.drafter_dtype or "",
        home_quantization=_rounding_at_home(config, is_model=is_model) if name else "",
        home_ms=config.simulate_draft_ms if name else 0.0,
        home_ms_per_row=config.simulate_draft_ms_per_row if name else 0.0,
        layers=config.layers if drafts else (),
        computes_alone=not (drafts and config.has_draft_process),
        remembered_as=_remembered_as(config) if drafts and config.has_draft_process else "",
        quantization=config.quantization or "",
        gpu_memory_utilization=config.gpu_memory_utilization or 0.0,
    )


def _remembered_as(config: PairConfig) -> str:
    """Return by what the drafter is known to later starts of this pair; "": it is not remembered.

    Not where hardware is simulated: its times are not those of this machine.
    """
    if not config.keep_speeds or os.environ.get(KEEP_SPEEDS) == "0" or config.simulated is not None:
        return ""
    name, revision = config.drafter, config.drafter_revision
    where = str(path_of(name)) if is_folder(name) else name
    said = revision, config.drafter_quantization, config.drafter_dtype, config.drafter_device
    size = f"{_file_bytes(name, revision)} bytes"
    return ", ".join((where, size, *(one for one in said if one)))


def _rounding_at_home(config: PairConfig, *, is_model: bool) -> str:
    return (config.drafter_quantization or "") if is_model else _of_head(config)


def _of_head(config: PairConfig) -> str:
    """Return how a head's matrices are rounded; a number type that was asked for stays."""
    return config.drafter_quantization or ("" if config.drafter_dtype else OF_A_HEAD)


def _drafter(config: PairConfig, endpoint: str, outside: str, secret: str) -> NodeConfig:
    """Return the drafter's config. A head is not timed for the fastest dtype: it is one layer."""
    is_head = config.drafter_is_head
    dtype = config.drafter_dtype or config.dtype
    return NodeConfig(
        role=Role.DRAFTER,
        endpoint=endpoint,
        identity="drafter-1",
        secret=secret,
        model=config.drafter,
        revision=config.drafter_revision,
        dtype="auto" if is_head and dtype == FASTEST else dtype,
        dtype_on_cpu="" if is_head or config.drafter_dtype else FASTEST,
        device=config.drafter_device,
        tensor_parallel_size=config.drafter_tensor_parallel_size,
        peer_size=config.ranks[Role.TARGET],
        peer_device=config.target_device,
        outside=outside,
        max_model_len=config.asked_len,
        backend=config.backend,
        busy_poll_us=config.busy_poll_us,
        max_num_seqs=config.num_seqs,
        simulated_ms=config.simulate_draft_ms,
        simulated_ms_per_row=config.simulate_draft_ms_per_row,
        max_candidates=config.max_draft_candidates,
        target=config.target if is_head else "",
        target_revision=config.target_revision if is_head else None,
        quantization=_of_head(config) if is_head else config.drafter_quantization or "",
        gpu_memory_utilization=config.gpu_memory_utilization or 0.0,
    )
