"""The first half hour on a GPU machine: what travels there, what is measured, what came of it."""

from proto.installation import check_programs

check_programs()
