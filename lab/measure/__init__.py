"""Small measurements, each of one thing, besides the experiments."""

from proto.installation import check_programs

check_programs()
