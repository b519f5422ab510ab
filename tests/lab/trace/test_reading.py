"""Only a trace of ours is read, and a damaged one is refused in one line."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.tracing.chrome import VERSION, chrome_trace
from coordinator.tracing.timeline import timeline_of
from lab.trace.critical_path import paths_of
from lab.trace.reading import parse
from proto.errors import ConfigurationError
from tests.coordinator.tracing.recordings import HOST, one_round

TRACE = chrome_trace(timeline_of(one_round().finished(), HOST), {"machine": {"host": HOST}})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        (json.dumps(TRACE)[:-9], "no JSON"),
        ("[]", "no trace of slipstream"),
        ("7", "no trace of slipstream"),
        ('{"traceEvents": []}', "no trace of slipstream"),
        ('{"traceEvents": [], "otherData": {"version": "Chrome 1"}}', "no trace of slipstream"),
        (json.dumps({"otherData": {**TRACE["otherData"], "version": VERSION + 1}}), "of version"),
        (json.dumps({"otherData": TRACE["otherData"]}), "damaged"),
        (json.dumps({**TRACE, "traceEvents": {"ph": "X"}}), "damaged"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigurationError, match=line) as refusal:
        parse(text, "file.json")
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("file.json ")


JUNK = st.one_of(
    st.none(), st.text(max_size=3), st.integers(-9, 9), st.just([]), st.floats(allow_nan=False)
)


@given(st.data())
def test_a_damaged_event_is_read_or_refused(data: st.DataObject) -> None:
    trace: dict[str, Any] = copy.deepcopy(TRACE)
    for _ in range(data.draw(st.integers(1, 3))):
        event = data.draw(st.sampled_from(trace["traceEvents"]))
        place = data.draw(st.sampled_from([event, event.get("args") or event]))
        if isinstance(place, dict) and place:
            name = data.draw(st.sampled_from(sorted(place)))
            if data.draw(st.booleans()):
                del place[name]
            else:
                place[name] = data.draw(JUNK)
    try:
        read = parse(json.dumps(trace), "file.json")
    except ConfigurationError:
        return
    for path in paths_of(read):
        assert path.rounds
