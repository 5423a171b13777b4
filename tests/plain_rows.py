from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from chatmill.rows import NO_FILE, ORIGIN, SPAN, File, Part, Role, Rows, Rule, offsets

# A row as plain data is a list of segments (origin, spans). A span is (ids, role, message, weight, rule, target).
spans_ = st.tuples(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4),
    st.sampled_from([Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL]),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([Rule.ROLE, Rule.HEADER, Rule.FLAG]),
    st.sampled_from([-1, -1, 7]),
)
origins_ = st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 2**40))
rows_ = st.lists(st.lists(st.tuples(origins_, st.lists(spans_, max_size=4)), max_size=3), max_size=4)


def build(plain: list) -> Rows:
    segments = [segment for row in plain for segment in row]
    spans = [span for _, of_segment in segments for span in of_segment]
    names = sorted({name for (name, _), _ in segments if name is not None})
    table = np.zeros(len(spans), dtype=SPAN)
    for at, (ids, role, message, weight, rule, target) in enumerate(spans):
        table[at] = (len(ids), message, weight, target, role, Part.CONTENT, rule)
    origins = np.zeros(len(segments), dtype=ORIGIN)
    for at, ((name, line), _) in enumerate(segments):
        origins[at] = (NO_FILE if name is None else names.index(name), line, (line, 2 * line))
    return Rows(
        np.array([i for ids, *_ in spans for i in ids], dtype=np.uint32),
        table,
        offsets(np.array([len(of_segment) for _, of_segment in segments], dtype=np.int64)),
        origins,
        offsets(np.array([len(row) for row in plain], dtype=np.int64)),
        tuple(File("source", name) for name in names),
    )


def unbuild(rows: Rows) -> list:
    plain, token = [], 0
    for row in range(len(rows)):
        segments = []
        for segment in range(rows.first_segment[row], rows.first_segment[row + 1]):
            spans = []
            for span in range(rows.first_span[segment], rows.first_span[segment + 1]):
                entry = rows.spans[span]
                ids = rows.ids[token : token + entry["length"]].tolist()
                token += int(entry["length"])
                spans.append(
                    (ids, entry["role"], entry["message"], float(entry["weight"]), entry["rule"], entry["target"])
                )
            file = rows.origins[segment]["file"]
            name = None if file == NO_FILE else rows.files[file].path
            segments.append(((name, int(rows.origins[segment]["line"])), spans))
        plain.append(segments)
    assert token == len(rows.ids)
    return plain
