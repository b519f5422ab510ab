"""Makes the pictures of the README by running what they show: `make pictures`."""

from proto.installation import check_programs

check_programs()
