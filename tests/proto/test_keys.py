"""Keys in folders: one for the coordinator, and one for each target and drafter."""

from pathlib import Path

import pytest

from proto.errors import ConfigurationError
from proto.links.keys import (
    add_node,
    file_of,
    names_of,
    of_coordinator,
    of_node,
    own_name,
    write_new,
)
from proto.messages import Role
from proto.node_config import MAX_NODES

DRAFTERS = names_of(Role.DRAFTER)


def copied(folder: Path, to: Path, *names: str) -> Path:
    """A folder with these files alone."""
    to.mkdir()
    for name in names:
        (to / name).write_bytes((folder / name).read_bytes())
        (to / name).chmod(0o600)
    return to


def test_a_coordinator_knows_every_node_that_has_keys_in_its_folder(tmp_path: Path) -> None:
    write_new(tmp_path, 3, 2)
    keys = of_coordinator(tmp_path, Role)
    names = [b"drafter-1", b"drafter-2", b"drafter-3", b"target-1", b"target-2"]
    assert sorted(keys.nodes) == names
    assert len(set(keys.nodes.values())) == 5
    for name in DRAFTERS[:3]:
        key = of_node(tmp_path, name).own.public
        assert keys.is_of(name.encode(), key)
        assert keys.name_of(key) == name.encode()
        assert not keys.is_of(b"target-1", key)


@pytest.mark.parametrize("role", Role)
def test_a_node_may_be_added_until_there_are_as_many_as_can_take_part(
    role: Role, tmp_path: Path
) -> None:
    write_new(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for number in range(2, MAX_NODES[role] + 1):
        assert [file.name for file in add_node(tmp_path, role)] == [
            f"{role}-{number}.key",
            f"{role}-{number}.key_secret",
        ]
    with pytest.raises(ConfigurationError, match="more cannot take part"):
        add_node(tmp_path, role)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert len(of_coordinator(tmp_path, Role).nodes) == MAX_NODES[role] + 1
    modes = {file.stat().st_mode & 0o077 for file in tmp_path.glob("*.key_secret")}
    assert modes == {0}


def test_no_drafter_is_added_where_there_are_no_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the key"):
        add_node(tmp_path, Role.DRAFTER)


def test_a_node_is_the_one_whose_secret_key_it_has(tmp_path: Path) -> None:
    write_new(tmp_path / "all", 2)
    second = copied(
        tmp_path / "all", tmp_path / "2", "coordinator.key", "drafter-2.key", "drafter-2.key_secret"
    )
    assert own_name(second, Role.DRAFTER) == "drafter-2"
    assert of_node(second, "drafter-2").own == of_node(tmp_path / "all", "drafter-2").own
    assert own_name(tmp_path / "all", Role.DRAFTER) == "drafter-1"
    assert own_name(None, Role.DRAFTER) == "drafter-1"
    assert own_name(second, Role.TARGET) == "target-1"


def test_the_first_of_a_role_needs_no_number_in_its_files() -> None:
    assert [file_of(name) for name in DRAFTERS[:2]] == ["drafter", "drafter-2"]
    assert list(map(file_of, names_of(Role.TARGET)[:2])) == ["target", "target-2"]
