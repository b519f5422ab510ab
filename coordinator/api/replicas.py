"""The settings for several servers on Ray Serve: how many, and what each may use."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from coordinator.api.config_base import Frozen
from proto.errors import ConfigurationError

MOST_REPLICAS = 1024


class ReplicasConfig(Frozen):
    """How many servers Ray Serve runs, and what of the cluster each one gets."""

    ray_serve: Annotated[
        bool,
        Field(
            description="Serve with Ray Serve, on a Ray cluster. Each replica is a whole server: "
            "target, drafter and coordinator. --ray names the cluster (docs/cluster.md)."
        ),
    ] = False
    replicas: Annotated[
        int,
        Field(ge=1, le=MOST_REPLICAS, description="With --ray-serve: how many replicas, at least."),
    ] = 1
    max_replicas: Annotated[
        int | None,
        Field(
            ge=1,
            le=MOST_REPLICAS,
            description="With --ray-serve: how many replicas at most. Ray Serve adds one when "
            "there are more requests than the replicas write at once, and ends it later. Default: "
            "--replicas.",
        ),
    ] = None
    replica_gpus: Annotated[
        int | None,
        Field(
            ge=0,
            le=64,
            description="With --ray-serve: GPUs of a replica, all on one host. Default: two where "
            "a host of the cluster has two, else what it has.",
        ),
    ] = None
    replica_cpus: Annotated[
        float,
        Field(
            ge=0,
            le=1024,
            allow_inf_nan=False,
            description="With --ray-serve: CPUs that a replica reserves. It may use all of its "
            "host's.",
        ),
    ] = 1.0

    @property
    def most(self) -> int:
        """Return how many replicas there may be."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if not self.ray_serve:
            for name in ("replicas", "max_replicas", "replica_gpus", "replica_cpus"):
                if getattr(self, name) != ReplicasConfig.model_fields[name].default:
                    flag = "--" + name.replace("_", "-")
                    raise ConfigurationError(f"{flag} is for --ray-serve")
        if self.most < self.replicas:
            raise ConfigurationError(
                f"--max-replicas {self.most} is fewer than --replicas {self.replicas}"
            )
        return self
