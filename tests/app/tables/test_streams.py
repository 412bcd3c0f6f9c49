"""Tests of the byte streams a parser reads."""

import io
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.app.tables.streams import CheckedBytes, ParserInput, wait_for_release


class Trickle(io.RawIOBase):
    """A stream that gives a few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self.data.read(min(size, 3) if size > 0 else size)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=50), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_a_stream_is_read_whole_in_blocks_of_the_size_asked_for(text, size):
    stream, blocks = CheckedBytes(Trickle(text.encode()), "t"), []
    while block := stream.read(size):
        blocks.append(block)
    assert b"".join(blocks) == text.encode()
    assert all(len(block) == size for block in blocks[:-1])


def test_the_first_bytes_are_read_again():
    stream = CheckedBytes(io.BytesIO(b"abcdef"), "t")
    assert stream.first(4) == b"abcd"
    assert stream.read(3) + stream.read(10) + stream.read(10) == b"abcdef"


@pytest.mark.parametrize(("data", "message"), [
    (b"a\nb\xff", r"t, line 2: byte 4 \(0xff\) is not UTF-8 text; name the `encoding`"), (b"a\n\0", "t, line 2: holds a NUL byte"),
    ("é".encode()[:1], "is not UTF-8 text"),
])  # fmt: skip
def test_what_is_no_text_is_refused_with_its_line(data, message):
    stream = CheckedBytes(io.BytesIO(data), "t")
    with pytest.raises(ValueError, match=message):
        while stream.read(2):
            pass


def test_an_object_that_a_thread_still_holds_is_waited_for():
    held = ParserInput(io.BytesIO().read, [])
    reference = weakref.ref(held)
    threading.Thread(target=lambda _: time.sleep(0.1), args=[held]).start()
    del held
    assert reference() is not None
    wait_for_release(reference)
    assert reference() is None


def test_an_object_that_is_never_released_is_waited_for_no_longer_than_said():
    held = ParserInput(io.BytesIO().read, [])
    wait_for_release(weakref.ref(held), seconds=0.01)
    assert held.readable()
