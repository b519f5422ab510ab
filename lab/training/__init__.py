"""The programs that made the embedded models, and those that measured them."""

from proto.installation import check_programs

check_programs()
