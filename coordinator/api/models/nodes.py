"""Makes the configs that the nodes of a pair are started with."""

from coordinator.api.config import REPRODUCIBLE_ROWS, PairConfig
from proto.messages import Role
from proto.node_config import NodeConfig

FASTEST = "fastest"


def node_configs(
    config: PairConfig, *, endpoint: str, outside: str, secret: str, drafts: bool
) -> list[NodeConfig]:
    """Return the target's config, and the drafter's if drafts come from a process of their own.

    endpoint, outside  where the coordinator listens, for nodes of this host and of others
    secret             shows that a node was started for this coordinator
    drafts             False: the target decodes alone, and loads no heads either
    """
    target = _target(config, endpoint, outside, secret, drafts=drafts)
    if not drafts or not config.has_draft_model:
        return [target]
    return [target, _drafter(config, endpoint, outside, secret)]


def _target(
    config: PairConfig, endpoint: str, outside: str, secret: str, *, drafts: bool
) -> NodeConfig:
    heads, heads_revision = (config.home_heads if drafts else None) or ("", None)
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
        peer_device=config.drafter_device if drafts and config.has_draft_model else None,
        placement=config.placement,
        outside=outside,
        max_model_len=config.asked_len,
        backend=config.backend,
        busy_poll_us=config.busy_poll_us,
        max_num_seqs=config.num_seqs,
        fixed_rows=REPRODUCIBLE_ROWS if config.reproducible else 0,
        simulated_ms=config.simulate_target_ms,
        simulated_ms_per_row=config.simulate_target_ms_per_row,
        heads=heads,
        heads_revision=heads_revision,
        heads_ms=config.simulate_draft_ms if heads else 0.0,
        heads_ms_per_row=config.simulate_draft_ms_per_row if heads else 0.0,
        layers=config.layers if drafts else (),
        quantization=config.quantization or "",
    )


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
        quantization="" if is_head else config.drafter_quantization or "",
    )
