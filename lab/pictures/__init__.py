"""The pictures of the README, each made by running what it shows: `make pictures`."""

from proto.installation import check_programs

check_programs()
