from __future__ import annotations

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightsError
from asyncrl.weights.fingerprint import bucket_fingerprint, chain
from asyncrl.weights.manifest import Manifest, build_manifest

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
tensors = st.lists(st.tuples(shapes, dtypes, st.integers(0, 3)), min_size=1, max_size=20).map(
    lambda rows: [
        (f"model.layers.{layer}.w{i}" if layer else f"top{i}", shape, dtype)
        for i, (shape, dtype, layer) in enumerate(sorted(rows, key=lambda row: row[2]))
    ]
)


@given(tensors, st.integers(16, 2000))
@settings(max_examples=100, deadline=None)
def test_every_tensor_survives_the_way_through_the_buckets(rows, cap):
    manifest = build_manifest(rows, cap)
    buffers = manifest.allocate()
    originals = {name: (torch.rand(shape) * 100).to(dtype) for name, shape, dtype in rows}
    for name, view in manifest.views(buffers).items():
        view.copy_(originals[name])
    again = Manifest.from_wire(msgpack.unpackb(msgpack.packb(manifest.to_wire())))
    assert again == manifest
    for name, view in again.views(buffers).items():
        assert view.dtype == originals[name].dtype and torch.equal(view, originals[name])
    for bucket in manifest.buckets:
        assert bucket.nbytes <= cap or len(bucket.entries) == 1


def test_a_layer_stays_in_one_bucket_unless_it_alone_exceeds_the_cap():
    rows = [(f"model.layers.{i}.{part}", (8, 8), torch.float32) for i in range(4) for part in "abc"]
    manifest = build_manifest(rows, cap_bytes=4 * 3 * 8 * 8 * 2)
    assert [{e.name.split(".")[2] for e in b.entries} for b in manifest.buckets] == [{"0", "1"}, {"2", "3"}]
    split = build_manifest(rows, cap_bytes=4 * 8 * 8)
    assert [len(bucket.entries) for bucket in split.buckets] == [1] * 12


@pytest.mark.parametrize(
    "wire", [[[["a", [2], "object"]]], [[["a", [-1], "float32"]]], [[["a", [1], "int8"], ["a", [1], "int8"]]]]
)
def test_a_manifest_that_makes_no_sense_is_refused(wire):
    with pytest.raises(WeightsError):
        Manifest.from_wire(wire)


@given(st.binary(min_size=1, max_size=300), st.data())
@settings(max_examples=100, deadline=None)
def test_any_changed_byte_changes_the_fingerprint(data, draw):
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    index = draw.draw(st.integers(0, len(data) - 1))
    changed = buffer.clone()
    changed[index] ^= draw.draw(st.integers(1, 255))
    assert bucket_fingerprint(buffer) == bucket_fingerprint(buffer.clone()) != bucket_fingerprint(changed)


def test_the_chained_fingerprint_depends_on_order_and_number():
    assert chain(["a", "b"]) == chain(["a", "b"])
    assert len({chain(["a", "b"]), chain(["b", "a"]), chain(["ab"]), chain(["a", "b", ""]), chain(["a"])}) == 5
