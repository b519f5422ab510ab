"""Hypothesis strategies: every message that may be sent, its limits included."""

from dataclasses import replace

from hypothesis import strategies as st

from proto import messages as m
from proto.stopwatch import Phase

U16, U32, U63, U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1
I31 = (1 << 31) - 1

sessions = st.integers(0, U63)
incarnations = st.integers(0, U32)
counts = st.integers(0, U32)
lengths = st.integers(0, m.MAX_TEXT_LEN)
hashes = st.integers(0, U64)
microseconds = st.integers(0, U63)
token_ids = st.integers(0, I31)


def token_lists(most: int, least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Tuples of token ids."""
    return st.lists(token_ids, min_size=least, max_size=most).map(tuple)


def texts(most: int) -> st.SearchStrategy[str]:
    """Texts without half characters, of one to four bytes each in UTF-8."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=most)


policies = st.builds(
    m.Policy,
    texts(32),
    st.integers(0, m.MAX_WINDOW),
    st.integers(0, m.MAX_WINDOW),
    st.integers(0, m.MAX_WINDOW),
    st.integers(0, m.MAX_WINDOW),
    prices_rows=st.booleans(),
    prices_waits=st.booleans(),
    prices_awaited=st.booleans(),
    rest_after=counts,
    width=st.integers(1, m.MAX_WIDTH),
    branches=st.integers(1, m.MAX_BRANCHES),
    detours=st.integers(0, m.MAX_WINDOW),
    subtree=st.booleans(),
)
samplings = st.builds(
    m.SamplingSpec,
    st.floats(0.0, 100.0),
    st.integers(0, I31),
    st.floats(0.0, 1.0),
    st.integers(0, U64),
    st.integers(0, U16),
)


@st.composite
def shaped_samplings(draw: st.DrawFn) -> m.SamplingSpec:
    """Every field at once."""
    bias = draw(st.lists(st.tuples(token_ids, st.floats(-100, 100, width=32)), max_size=5))
    return replace(
        draw(samplings),
        min_p=draw(st.floats(0.0, 1.0)),
        repetition_penalty=draw(st.floats(1e-3, 1e3)),
        presence_penalty=draw(st.floats(-2.0, 2.0)),
        frequency_penalty=draw(st.floats(-2.0, 2.0)),
        bias_ids=tuple(token for token, _ in bias),
        bias_values=tuple(value for _, value in bias),
        banned=tuple(draw(st.lists(token_lists(4, least=1), max_size=80))),
        min_tokens=draw(lengths),
        late_ids=draw(token_lists(8)),
        num_logprobs=draw(st.integers(m.OFF, m.MAX_LOGPROBS)),
        num_prompt_logprobs=draw(st.integers(m.OFF, m.MAX_LOGPROBS)),
        grammar=draw(texts(200)),
        end_ids=draw(token_lists(8)),
        allowed_ids=draw(token_lists(8)),
    )


@st.composite
def logprobs(draw: st.DrawFn, num_rows: int) -> m.Logprobs:
    """So many rows of one width."""
    width = draw(st.integers(1, 4))
    rows, each = range(num_rows), range(num_rows * width)
    return m.Logprobs(
        tuple(draw(token_ids) for _ in each),
        tuple(draw(st.floats(-(2.0**96), 0.0, width=32)) for _ in each),
        tuple(draw(st.integers(1, I31)) for _ in rows),
    )


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> m.PromptLogprobs:
    """A few rows."""
    rows = draw(logprobs(draw(st.integers(0, 5))))
    return m.PromptLogprobs(
        draw(sessions), draw(incarnations), draw(st.integers(1, m.MAX_TEXT_LEN)), rows
    )


layer_lists = st.lists(st.integers(-1, U16), max_size=m.MAX_LAYERS).map(tuple)
fingerprints = st.builds(m.Fingerprint, st.integers(1, I31), texts(128), token_lists(8))


@st.composite
def lookups(draw: st.DrawFn) -> m.Lookup:
    """N-grams of any lengths, with and without a reference."""
    ngram_max = draw(st.integers(1, m.MAX_NGRAM))
    return m.Lookup(
        draw(st.integers(1, ngram_max)), ngram_max, draw(token_lists(20)), draw(st.booleans())
    )


@st.composite
def opens(draw: st.DrawFn) -> m.Open:
    """A text that is not yet of its greatest length."""
    tokens = draw(token_lists(50, least=1))
    return m.Open(
        session=draw(sessions),
        incarnation=draw(incarnations),
        key=draw(st.binary(min_size=16, max_size=16)),
        tokens=tokens,
        num_prompt=draw(st.integers(1, len(tokens))),
        sampling=draw(samplings if draw(st.booleans()) else shaped_samplings()),
        policy=draw(policies),
        limits=m.Limits(draw(st.integers(len(tokens) + 1, m.MAX_TEXT_LEN)), draw(token_lists(8))),
        lookup=draw(st.none() | lookups()),
        layers=draw(layer_lists),
    )


@st.composite
def drafts(draw: st.DrawFn) -> m.Draft:
    """Any small tree, parents first."""
    tokens = draw(token_lists(m.MAX_NODES_PER_DRAFT if draw(st.booleans()) else 4))
    number = draw(counts)
    return m.Draft(
        session=draw(sessions),
        incarnation=draw(incarnations),
        source=draw(st.integers(0, m.MAX_SOURCES - 1).filter(lambda one: one not in m.OWN_SOURCES)),
        first_number=draw(st.integers(0, number)),
        number=number,
        parent_hash=draw(hashes),
        parent_len=draw(lengths),
        tokens=tokens,
        parents=tuple(draw(st.integers(-1, index - 1)) for index in range(len(tokens))),
        scores=tuple(draw(st.floats(-(2.0**96), 0.0, width=32)) for _ in tokens),
        done=draw(st.booleans()),
        model_us=draw(microseconds),
    )


@st.composite
def features(draw: st.DrawFn) -> m.Features:
    """A few rows of one width."""
    num_rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    return m.Features(
        session=draw(sessions),
        incarnation=draw(incarnations),
        end_len=draw(st.integers(num_rows + 1, m.MAX_TEXT_LEN)),
        end_hash=draw(hashes),
        num_rows=num_rows,
        dtype=draw(texts(16)),
        data=draw(st.binary(min_size=num_rows * width, max_size=num_rows * width)),
    )


@st.composite
def verdicts(draw: st.DrawFn) -> m.Verdict:
    """Some tokens, some acks, and counts that fit each other."""
    tokens = draw(token_lists(64))
    num_drafted = draw(counts)
    num_accepted = draw(st.integers(0, num_drafted))
    num_rejected = min(m.MAX_NODES_PER_DRAFT, num_drafted - num_accepted)
    num_sources = num_accepted if num_accepted <= 8 else 0
    acks = st.builds(m.Ack, st.integers(0, m.MAX_SOURCES - 1), incarnations, counts)
    return m.Verdict(
        session=draw(sessions),
        incarnation=draw(incarnations),
        base_len=draw(st.integers(0, m.MAX_TEXT_LEN - len(tokens))),
        base_hash=draw(hashes),
        tokens=tokens,
        acks=tuple(draw(st.lists(acks, max_size=m.MAX_SOURCES))),
        cause=draw(st.sampled_from(m.Cause)),
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_rolled_back=draw(counts),
        num_stale=draw(counts),
        wait_us=draw(microseconds),
        model_us=draw(microseconds),
        host_us=draw(microseconds),
        rejected=draw(token_lists(min(num_rejected, 8))),
        logprobs=draw(logprobs(len(tokens))) if draw(st.booleans()) else None,
        sources=tuple(draw(st.integers(0, m.MAX_SOURCES - 1)) for _ in range(num_sources)),
        num_awaited=draw(st.integers(0, m.MAX_WINDOW)),
    )


marks = st.builds(m.SessionMark, sessions, incarnations, lengths, hashes, lengths)

messages: st.SearchStrategy[m.Message] = st.one_of(
    opens(),
    drafts(),
    verdicts(),
    st.builds(m.Close, sessions, texts(200)),
    st.builds(
        m.Hello,
        counts,
        st.sampled_from(m.Role),
        texts(128),
        fingerprints,
        st.integers(1, I31),
        st.integers(1, I31),
        texts(400),
        texts(32),
        texts(64),
        st.integers(0, U63),
        microseconds,
        st.integers(1, m.MAX_SESSIONS),
        texts(256),
        texts(64),
        microseconds,
        microseconds,
        layer_lists,
        st.integers(0, I31),
        st.integers(0, I31),
        texts(64),
    ),
    st.builds(m.Welcome, st.integers(1, I31), st.integers(0, m.MAX_SOURCES - 1), st.booleans()),
    st.builds(
        m.Heartbeat,
        st.lists(marks, max_size=m.MAX_SESSIONS).map(tuple),
        counts,
        texts(200),
        st.lists(counts, max_size=len(Phase)).map(tuple),
        st.lists(counts, max_size=len(Phase)).map(tuple),
        counts,
        counts,
        microseconds,
        microseconds,
        microseconds,
        microseconds,
        counts,
        microseconds,
        microseconds,
    ),
    st.builds(m.Fault, sessions, incarnations, st.sampled_from(m.FaultCode), texts(2000)),
    features(),
    prompt_logprobs(),
    st.builds(
        m.TracePart,
        counts,
        counts,
        st.lists(
            st.binary(min_size=m.TRACE_RECORD_BYTES, max_size=m.TRACE_RECORD_BYTES), max_size=3
        ).map(b"".join),
    ),
)
