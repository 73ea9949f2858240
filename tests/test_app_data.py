"""Data: what is found, how it is split, and that batches depend on the seed and the step alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdm_lite.app.data import HELD_OUT, load_corpus
from sdm_lite.app.mistakes import CommandError
from sdm_lite.app.mqar import recall_batch, training_batch


def folder_of(tmp_path, count, size=400):
    for index in range(count):
        name = f"{'inner/' if index % 2 else ''}{index:03d}.txt"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"file {index} " * (size // 8))
    return tmp_path


def test_split_is_by_content(tmp_path):
    folder_of(tmp_path, 200)
    corpus = load_corpus("train", str(tmp_path), 16)
    documents = {document.tobytes() for document in corpus.documents}
    for path in tmp_path.rglob("*.txt"):
        code = int.from_bytes(hashlib.sha256(path.read_bytes()).digest()[:8], "big")
        assert (path.read_bytes() in documents) == (code % HELD_OUT == 0)
    assert 0 < len(documents) < 40
    assert len(corpus.train) + len(corpus.held_out) > sum(p.stat().st_size for p in tmp_path.rglob("*.txt"))


def test_no_training_byte_is_held_out(tmp_path):
    folder_of(tmp_path, 200)
    corpus = load_corpus("train", str(tmp_path), 16)
    assert all(document.tobytes() not in corpus.train.tobytes() for document in corpus.documents)


def test_fingerprint_follows_contents(tmp_path):
    folder_of(tmp_path, 60)
    first = load_corpus("train", str(tmp_path), 16).fingerprint
    assert load_corpus("train", str(tmp_path), 16).fingerprint == first
    (tmp_path / "000.txt").write_text("something else")
    assert load_corpus("train", str(tmp_path), 16).fingerprint != first


def test_binary_hidden_and_installed_files_are_left_out(tmp_path):
    folder_of(tmp_path, 40)
    expected = load_corpus("train", str(tmp_path), 16)
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0" * 100)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / ".hidden").write_text("secret " * 100)
    for folder in ("site-packages", "__pycache__", ".git"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "more.txt").write_text("more " * 100)
    assert load_corpus("train", str(tmp_path), 16).fingerprint == expected.fingerprint


def test_one_file_is_cut_at_its_end(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 251)) * 40)
    corpus = load_corpus("train", str(path), 16)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == path.read_bytes()
    assert len(corpus.held_out) == 500


def test_few_files_still_give_both_parts(tmp_path):
    folder_of(tmp_path, 2)
    corpus = load_corpus("train", str(tmp_path), 16)
    assert min(len(corpus.train), len(corpus.held_out)) > 17


def test_default_is_the_standard_library():
    corpus = load_corpus("train", None, 512)
    assert len(corpus.train) > 5_000_000 and len(corpus.held_out) > 100_000
    assert b"import argparse" in corpus.train.tobytes()
    assert corpus.long_documents(8192, 24).shape == (24, 8193)


@pytest.mark.parametrize("size", [0, 10, 70])
def test_too_little_text(tmp_path, size):
    (tmp_path / "small.txt").write_text("x" * size)
    with pytest.raises(CommandError, match="at least 72 bytes"):
        load_corpus("train", str(tmp_path), 16)


def test_smallest_text_that_is_enough(tmp_path):
    (tmp_path / "small.txt").write_text("x" * 72)
    corpus = load_corpus("train", str(tmp_path), 16)
    assert corpus.windows(16, 3, seed=0, step=0).shape == (3, 17)
    assert corpus.held_out_windows(16, 64).shape[1] == 17
    assert corpus.long_documents(256, 4).shape[1] == len(corpus.held_out)


def test_nothing_there(tmp_path):
    with pytest.raises(CommandError, match="not there"):
        load_corpus("train", str(tmp_path / "nowhere"), 16)


def test_windows_depend_on_seed_and_step_alone(tmp_path):
    corpus = load_corpus("train", str(folder_of(tmp_path, 60)), 16)
    one = corpus.windows(16, 4, seed=1, step=7)
    corpus.windows(16, 4, seed=1, step=8)
    assert np.array_equal(corpus.windows(16, 4, seed=1, step=7), one)
    assert not np.array_equal(corpus.windows(16, 4, seed=1, step=8), one)
    assert not np.array_equal(corpus.windows(16, 4, seed=2, step=7), one)
    assert all(window.tobytes() in corpus.train.tobytes() for window in one)


@given(pairs=st.integers(1, 12), rows=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_recall_rows_can_be_answered(pairs, rows, seed):
    ids, targets = recall_batch(pairs, rows, keys=12, values=5, generator=np.random.default_rng(seed))
    assert ids.shape == (rows, 3 * pairs) and targets.shape == (rows, pairs)
    for row, wanted in zip(ids, targets):
        keys, values, queries = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], row[2 * pairs :]
        assert len(set(keys.tolist())) == pairs and keys.max() < 12
        assert values.min() >= 12 and values.max() < 17
        assert sorted(queries.tolist()) == sorted(keys.tolist())
        assert [values[keys.tolist().index(query)] for query in queries] == wanted.tolist()


def test_recall_batches_stay_within_their_size():
    sizes = set()
    for step in range(50):
        ids, targets = training_batch((4, 64), 600, 8, 100, 10, seed=0, step=step)
        assert len(ids) <= 8 and ids.size <= 600
        sizes.add(targets.shape)
    assert sizes == {(8, 4), (3, 64)}
    assert np.array_equal(ids, training_batch((4, 64), 600, 8, 100, 10, seed=0, step=49)[0])
