"""Frames: what is sent is what is read, and nothing else is taken for one."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.transport.frames import HEADER, MAX_META, Frame, FrameError, Kind, decode_meta, unpack
from spool.transport.link import read_frame

META = st.dictionaries(st.text(max_size=20), st.one_of(st.integers(), st.text(max_size=20)))


def read(data: bytes) -> Frame:
    async def run() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(run())


@given(
    st.sampled_from([kind for kind in Kind if kind != Kind.SHARD]),
    st.integers(0, 2**64 - 1),
    META,
    st.binary(max_size=200),
)
def test_a_frame_comes_back(kind: Kind, sequence: int, meta: dict, body: bytes) -> None:
    frame = Frame(kind, sequence, meta, body)
    assert read(frame.encode()) == frame


@given(META, st.binary(max_size=200), st.data())
def test_a_frame_with_a_bit_flipped_is_none(meta: dict, body: bytes, data: st.DataObject) -> None:
    text = bytearray(Frame(Kind.STEP, 7, meta, body).encode())
    place = data.draw(st.integers(0, 8 * len(text) - 1))
    text[place // 8] ^= 1 << place % 8
    with pytest.raises((FrameError, EOFError)):
        read(bytes(text))


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_bytes_that_are_no_header(data: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(data, 1 << 20)


@given(st.binary(max_size=100))
def test_bytes_that_are_no_object(data: bytes) -> None:
    try:
        meta = decode_meta(data)
    except FrameError:
        return
    assert isinstance(meta, dict)


def test_lengths_are_looked_at_first() -> None:
    header = bytearray(Frame(Kind.SHARD, 1, {}, b"x" * 100).encode()[: HEADER.size])
    assert unpack(bytes(header), 100).body == 100
    with pytest.raises(FrameError, match="a frame of 0 and 100 bytes; 99 are allowed"):
        unpack(bytes(header), 99)
    text = Frame(Kind.STEP, 1, {"x": "y" * MAX_META}).encode()
    with pytest.raises(FrameError, match="are allowed"):
        unpack(text[: HEADER.size], 1)
