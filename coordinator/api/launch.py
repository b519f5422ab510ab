"""The settings for starting the node processes: on this machine, on a Ray cluster or by hand."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from coordinator.api.config_base import Frozen
from proto.errors import ConfigurationError, shown


def _check_ray_address(address: str) -> str:
    if not re.fullmatch(r"(auto|[^:/\s]+:\d+)?", address):
        raise ConfigurationError(f"--ray: expected auto or HOST:PORT, got {shown(address)}")
    return address


def _check_listen(endpoint: str) -> str:
    if not re.fullmatch(r"(tcp://\S+:(\d+|\*))?", endpoint):
        raise ConfigurationError(f"--listen: expected tcp://ADDRESS:PORT, got {shown(endpoint)}")
    return endpoint


class LaunchConfig(Frozen):
    """How and where the node processes are started."""

    ray: Annotated[
        str,
        AfterValidator(_check_ray_address),
        Field(
            description="Start the nodes on a Ray cluster. Its address is auto or HOST:PORT "
            "(docs/cluster.md). Default: this machine, without Ray."
        ),
    ] = ""
    ray_pack: Annotated[
        bool,
        Field(
            description="With --ray: run both nodes on one host. Otherwise each has a host of "
            "its own."
        ),
    ] = False
    nodes: Annotated[
        Literal["local", "remote"],
        Field(
            description="Who starts the nodes.\n"
            "local: this command, here or with --ray.\n"
            "remote: you, by hand with --join (docs/cluster.md); this command waits "
            "for them."
        ),
    ] = "local"
    listen: Annotated[
        str,
        AfterValidator(_check_listen),
        Field(
            description="With --nodes remote: where the nodes join. An address of this host: "
            "tcp://ADDRESS:PORT."
        ),
    ] = ""
    keys: Annotated[
        Path | None,
        BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value),
        Field(description="With --nodes remote: the folder of the keys. `keys new DIR` makes one."),
    ] = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        is_remote = self.nodes == "remote"
        if is_remote and self.ray:
            raise ConfigurationError("--ray starts the nodes, --nodes remote does not; give one")
        if is_remote and not self.listen:
            raise ConfigurationError("--nodes remote needs --listen tcp://ADDRESS:PORT")
        if not is_remote and (self.listen or self.keys is not None):
            raise ConfigurationError("--listen and --keys are for --nodes remote")
        if self.ray_pack and not self.ray:
            raise ConfigurationError("--ray-pack is for --ray")
        return self
