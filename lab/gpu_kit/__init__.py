"""The GPU kit: what travels to a GPU machine, and four scripts that measure there."""

from proto.installation import check_programs

check_programs()
