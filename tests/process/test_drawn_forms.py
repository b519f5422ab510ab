"""The forms that structured output is tested with, and how an answer is judged."""

import json
import re

import pytest

from tests.process.drawn_forms import Form, forms, pattern_of, schema_of

jsonschema = pytest.importorskip("jsonschema")


def test_drawn_forms_are_of_many_kinds_and_can_be_checked() -> None:
    schemas = [schema_of(seed) for seed in range(60)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len({json.dumps(schema) for schema in schemas}) > 50
    assert all(re.compile(pattern_of(seed)) for seed in range(60))
    drawn = list(forms(20))
    assert sum(bool(form.pattern) for form in drawn) == 4
    assert [form.params.kind for form in drawn[3:5]] == ["json", "regex"]


def test_an_answer_that_does_not_fit_is_seen() -> None:
    form = Form("x", {"type": "object", "required": ["a"]})
    assert form.fits('{"a": 1}')
    assert not form.fits("{}")
    assert Form("x", pattern="a+").fits("aa")
    assert not Form("x", pattern="a+").fits("aab")
