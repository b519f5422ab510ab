"""Models in the shape of large ones."""

from proto.installation import check_programs

check_programs()
