"""The embedded models, and the programs by which they were made and measured."""

from proto.installation import check_programs

check_programs()
