"""The three pure machines, joined by bad links, in seeded virtual time."""

from proto.installation import check_programs

check_programs()
