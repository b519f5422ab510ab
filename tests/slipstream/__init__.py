"""Tests of the package that other folders see."""
