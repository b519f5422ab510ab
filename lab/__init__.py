"""Measures, trains and explains; the product never imports it."""
