from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.layout import fields, packed_size, places, unpack
from jaxserve.device.forward_batch import unpack_batch

BUCKETS = [Bucket(1, 1, 1), Bucket(2, 2, 1), Bucket(8, 3, 5), Bucket(32, 16, 7)]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_fields_fill_the_vector_without_overlap(bucket: Bucket) -> None:
    vector = np.zeros(packed_size(bucket), np.int32)
    arrays = unpack(vector, places(bucket))
    assert list(arrays) == [field.name for field in fields(bucket)]
    for number, array in enumerate(arrays.values(), start=1):
        assert np.shares_memory(array, vector), "the host writes through views"
        array[...] += number
    for field, number in zip(fields(bucket), range(1, 100), strict=False):
        assert arrays[field.name].shape == field.shape
        assert (arrays[field.name] == number).all(), f"{field.name} shares memory with another field"
    assert (vector > 0).all(), "a gap that no field owns"


@given(seed=st.integers(0, 2**32 - 1), bucket=st.sampled_from(BUCKETS))
@settings(max_examples=30)
def test_jax_reads_what_numpy_wrote(seed: int, bucket: Bucket) -> None:
    vector = np.random.default_rng(seed).integers(-(2**31), 2**31, packed_size(bucket), np.int32)
    from_jax = unpack(jax.numpy.asarray(vector), places(bucket))
    for name, array in unpack(vector, places(bucket)).items():
        assert np.array_equal(np.asarray(from_jax[name]), array)


def test_scalars_can_be_written_in_place() -> None:
    bucket = BUCKETS[2]
    vector = np.zeros(packed_size(bucket), np.int32)
    for name in ("num_decodes", "num_seqs", "batch_flags"):
        unpack(vector, places(bucket))[name][...] = 7
        assert unpack(vector, places(bucket))[name] == 7


def test_floats_and_seeds_arrive_bit_for_bit() -> None:
    bucket = Bucket(8, 4, 2)
    vector = np.zeros(packed_size(bucket), np.int32)
    array = unpack(vector, places(bucket))
    values = np.array([1e-5, -0.0, 1e-42, 3.4e38], np.float32)
    floats = [field.name for field in fields(bucket) if field.is_float]
    assert len(floats) == 6
    for number, name in enumerate(floats):
        array[name].view(np.float32)[:] = np.roll(values, number)
    array["seed_low"][:] = [-1, 0, 1, -(2**31)]
    array["seed_high"][:] = [0, -1, 2**31 - 1, 5]
    batch = jax.jit(lambda v: unpack_batch(v, bucket))(vector)
    for number, name in enumerate(floats):
        arrived = np.asarray(getattr(batch.sampling, f"{name}_S"))
        assert arrived.dtype == np.float32
        assert np.array_equal(arrived.view(np.int32), np.roll(values, number).view(np.int32))
    high_low = [[0, 2**32 - 1], [2**32 - 1, 0], [2**31 - 1, 1], [5, 2**31]]
    assert batch.sampling.seeds_S2.dtype == np.uint32
    assert batch.sampling.seeds_S2.tolist() == high_low


def test_every_field_reaches_the_step() -> None:
    """Each field holds its own number: a field read under another's name shows."""
    bucket = Bucket(3, 2, 4)
    vector = np.zeros(packed_size(bucket), np.int32)
    for number, (field, array) in enumerate(
        zip(fields(bucket), unpack(vector, places(bucket)).values(), strict=True)
    ):
        if field.is_float:
            array.view(np.float32)[...] = number
        else:
            array[...] = number
    number = {field.name: i for i, field in enumerate(fields(bucket))}
    batch = unpack_batch(jax.numpy.asarray(vector), bucket)
    names = {"batch_flags": "flags", "block_tables": "block_tables_SB", "cu_q_lens": "cu_q_lens"}
    sampling = {"row_flags": "flags_S", "sample_positions": "positions_S"}
    for field in fields(bucket):
        if field.name.startswith("seed"):
            continue
        where = batch
        attribute = names.get(field.name)
        if attribute is None and hasattr(batch, field.name):
            attribute = field.name
        if attribute is None:
            suffix = "_T" if field.shape == (3,) and hasattr(batch, field.name + "_T") else "_S"
            attribute = sampling.get(field.name, field.name + suffix)
            where = batch if hasattr(batch, attribute) else batch.sampling
        assert (np.asarray(getattr(where, attribute)) == number[field.name]).all(), field.name
    assert batch.sampling.seeds_S2.tolist() == [[number["seed_high"], number["seed_low"]]] * 2
