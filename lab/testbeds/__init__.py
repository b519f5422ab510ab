"""Testbeds: models in the shape of large ones that generate the text of small ones."""

from proto.installation import check_programs

check_programs()
