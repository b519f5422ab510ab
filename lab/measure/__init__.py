"""Measurements of one thing each, besides the experiments."""

from proto.installation import check_programs

check_programs()
