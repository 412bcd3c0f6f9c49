"""The delimiter of a text table, detected from its first lines."""

from __future__ import annotations

import csv
import io

__all__ = ["delimiter_of"]

_CANDIDATES = (",", ";", "\t", "|")
_LINES = 100


def delimiter_of(text: str) -> str:
    r"""The delimiter under which the first records have the same number of fields, and most of them; "," if none has.

    Args:
        text: The beginning of the file.

    Example:
        >>> delimiter_of("a;b\n1,5;2,5\n"), delimiter_of("a\tb\n1\t2\n"), delimiter_of("a\n1\n")
        (';', '\t', ',')
    """
    best, most = ",", 1
    for candidate in _CANDIDATES:
        counts = _field_counts(text, candidate)
        if counts and len(set(counts)) == 1 and counts[0] > most:
            best, most = candidate, counts[0]
    if most == 1:  # rows of unequal lengths are reported as such later, under the header's own delimiter
        for candidate in _CANDIDATES:
            counts = _field_counts(text, candidate)
            if counts and counts[0] > most:
                best, most = candidate, counts[0]
    return best


def _field_counts(text: str, delimiter: str) -> list[int]:
    lines = text.splitlines(keepends=True)[: _LINES + 1]
    whole = lines if len(lines) <= _LINES else lines[:-1]
    try:
        return [
            len(record) for record in csv.reader(io.StringIO("".join(whole), newline=""), delimiter=delimiter) if record
        ]
    except csv.Error:
        return []
