"""The GPU kit: what travels to a GPU machine, the measurements there, and the report about them."""

from proto.installation import check_programs

check_programs()
