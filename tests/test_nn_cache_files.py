"""The cache of a HybridLM on disk: bits, refusals, kills and full disks."""

from __future__ import annotations

import random
import resource
import signal
import time

import pytest
import torch
from caches import MODELS, SIZES, VOCAB, build, run, same_cache, started, tokens
from kills import kill_while_saving

from sdm_lite.errors import DtypeError, FileError, FileFormatError, ValueRangeError
from sdm_lite.nn import HybridLM, HybridState


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products gain nothing from threads, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_cache_resumes_bit_for_bit(name, tmp_path):
    model, path, more = build(name), tmp_path / "cache.safetensors", tokens(3, 5, seed=2)
    cache = started(model, tokens(2, 6))
    cache.append()
    cache.save(path, of="weights")
    loaded = HybridState.load(path, build(name), of="weights")
    assert loaded.positions == cache.positions == [6, 6, 0]
    assert torch.equal(run(model, loaded, more), run(model, cache, more))
    assert same_cache(loaded, cache)


def test_a_file_of_another_model_is_refused_with_both_named(tmp_path):
    path = tmp_path / "cache"
    started(build("sdm"), tokens(1, 3)).save(path, of="one")
    model = build("sdm")
    for other, words in (
        (build("full"), ["layers", "'swa'", "'full'"]),
        (HybridLM(VOCAB, 16, 2, mlp_hidden=0, **{**SIZES, **MODELS["sdm"], "window": 5}), ["window = 5", "window = 4"]),
    ):
        with pytest.raises(FileFormatError) as caught:
            HybridState.load(path, other, of="one")
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(FileFormatError, match=r"weights two.*weights one"):
        HybridState.load(path, model, of="two")
    model.blocks[1].mixer.memory.add_(1)
    with pytest.raises(FileFormatError, match="initial memory"):
        HybridState.load(path, model, of="one")
    with pytest.raises(FileError, match="nowhere"):
        HybridState.load(tmp_path / "nowhere", model)
    with pytest.raises(ValueRangeError, match="empty"):
        HybridState().save(path)


def test_damaged_files_are_value_errors(tmp_path):
    model, path = build("sdm"), tmp_path / "cache"
    started(model, tokens(1, 6)).save(path)
    good, draw = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(good[:8], "little")
    for case in range(400):
        damaged = bytearray(good)
        if case % 4 == 0:
            damaged = damaged[: draw.randrange(len(good))]
        elif case % 4 == 1:
            damaged[draw.randrange(8)] ^= 1 << draw.randrange(8)  # the header's length: up to 2^63
        else:
            damaged[draw.randrange(8, header) if case % 4 == 2 else draw.randrange(header, len(good))] ^= (
                1 << draw.randrange(8)
            )
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"HybridState.load|MemoryState.load"):
            HybridState.load(path, model)
    path.write_bytes(good)
    assert HybridState.load(path, model).positions == [6]


def test_kill_while_saving_leaves_the_old_file_or_the_new(tmp_path):
    model, path = build("sdm"), tmp_path / "cache"
    caches = {count: started(model, tokens(1, count)) for count in (3, 9)}
    caches[3].save(path)
    begin = time.monotonic()
    caches[3].save(path)
    once, draw = time.monotonic() - begin, random.Random(0)
    saves = [lambda cache=cache: cache.save(path) for cache in reversed(caches.values())]
    seen = set()
    for kill in range(40):
        kill_while_saving(saves, finished=kill % 3, pause=draw.uniform(0, 2 * once))
        found = HybridState.load(path, model)
        assert same_cache(found, caches[found.position])
        seen.add(found.position)
    assert seen == {3, 9}


def test_a_full_disk_leaves_the_old_file(tmp_path):
    model, path = build("sdm"), tmp_path / "cache"
    started(model, tokens(1, 3)).save(path)
    before, cache = path.read_bytes(), started(model, tokens(1, 9))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(FileError):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["cache"]


def test_a_file_knows_the_weights_it_is_of(tmp_path):
    model = build("zero")
    started(model, tokens(1, 4)).save(tmp_path / "cache")
    other = build("zero", seed=1)
    with pytest.raises(FileFormatError, match="a cache of weights sha256"):
        HybridState.load(tmp_path / "cache", other)
    loaded = HybridState.load(tmp_path / "cache", model)
    loaded.save(tmp_path / "again")
    assert same_cache(HybridState.load(tmp_path / "again", model), loaded)
    other.load_state_dict(model.state_dict())
    assert HybridState.load(tmp_path / "cache", other).positions == [4]


def test_saving_without_the_model_asks_for_a_name(tmp_path):
    model = build("zero")
    cache = started(model, tokens(1, 4))
    alone = HybridState(cache.layers, cache.recent, cache.config)
    with pytest.raises(ValueRangeError, match="of: expected a name of the weights"):
        alone.save(tmp_path / "cache")
    alone.save(tmp_path / "cache", of="mine")
    assert HybridState.load(tmp_path / "cache", model, of="mine").positions == [4]


@pytest.mark.parametrize("name", ["sdm", "full"])
def test_a_cache_whose_sequences_are_gone_is_saved_and_goes_on(tmp_path, name):
    model = build(name)
    cache = started(model, tokens(2, 5))
    cache.evict([0, 1])
    model(tokens(0, 3), cache, inplace=True)
    cache.save(tmp_path / "cache")
    loaded = HybridState.load(tmp_path / "cache", model)
    loaded.append(2)
    ids = tokens(2, 4)
    assert loaded.positions == [0, 0]
    assert torch.equal(run(model, loaded, ids), run(model, HybridState(), ids))


@pytest.mark.parametrize("path", [None, 3, b"bytes", "a\0b", ""])
def test_what_is_no_path_is_refused(path):
    model = build("zero")
    cache = started(model, tokens(1, 2))
    for use in (lambda: cache.save(path), lambda: HybridState.load(path, model)):
        with pytest.raises((DtypeError, ValueRangeError), match="path"):
            use()


def test_what_is_no_model_or_name_is_refused(tmp_path):
    model = build("zero")
    cache = started(model, tokens(1, 2))
    cache.save(tmp_path / "cache")
    for use in (
        lambda: cache.save(tmp_path / "cache", of=3),
        lambda: HybridState.load(tmp_path / "cache", model, of=3),
        lambda: HybridState.load(tmp_path / "cache", None),
    ):
        with pytest.raises(DtypeError, match="HybridState"):
            use()
