"""Sessions that break the rules of ZMTP."""

from proto.installation import check_programs

check_programs()
