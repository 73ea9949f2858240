"""Checkpoints: exact, never half-written, and refused when they are not what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from sdm_lite.app import checkpoint, files
from sdm_lite.app.mistakes import CommandError


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(3, 4, generator=generator)
    return {
        "shared": shared,
        "again": shared,  # tied parameters share their memory
        "strided": torch.randn(4, 3, generator=generator).t(),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "step": torch.tensor(7.0),
    }


def save(folder, step=3, seed=0, name=checkpoint.LATEST):
    checkpoint.save(folder, tensors(seed), {"x": torch.ones(2)}, {"step": step, "config": {"dim": 4}}, name)


def test_what_comes_back_is_what_was_saved(tmp_path):
    save(tmp_path)
    found = checkpoint.load("train", tmp_path)
    assert (found.step, found.record["config"]) == (3, {"dim": 4})
    loaded = found.tensors("train", "model")
    for name, expected in tensors(0).items():
        assert loaded[name].dtype == expected.dtype and torch.equal(loaded[name], expected), name
    assert torch.equal(found.tensors("train", "optimizer")["x"], torch.ones(2))


def test_no_pickle_and_no_leftovers(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, seed=step)
    save(tmp_path, 2, seed=2, name="other")
    kinds = sorted(path.suffix for path in tmp_path.iterdir())
    assert kinds == [".json"] * 2 + [".safetensors"] * 4
    assert checkpoint.load("train", tmp_path).step == 3
    assert checkpoint.load("train", tmp_path, "other").step == 2
    assert checkpoint.load("train", tmp_path / "other.json").step == 2


@pytest.mark.parametrize("killed_at", ["model", "optimizer", "checkpoint.json"])
def test_a_failed_save_leaves_the_last_good_one(tmp_path, monkeypatch, killed_at):
    save(tmp_path, 1, seed=1)

    def replace(source, target, real=os.replace):
        if killed_at in os.path.basename(target):
            raise OSError("the disk is full")
        real(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(OSError, match="disk is full"):
        save(tmp_path, 2, seed=2)
    monkeypatch.undo()
    found = checkpoint.load("train", tmp_path)
    assert found.step == 1
    assert torch.equal(found.tensors("train", "model")["shared"], tensors(1)["shared"])
    save(tmp_path, 3, seed=3)
    assert {path.name.split("-")[1] for path in tmp_path.glob("*.safetensors")} == {"000003"}


KILLED = """
import os, pathlib, sys
sys.path.insert(0, {tests!r})
from test_app_checkpoint import save
from sdm_lite.app import files

def fsync(descriptor, left=[0]):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), 9)

files.os.fsync = fsync
for at in {at}:  # a child each, so that torch is imported once
    pid = os.fork()
    if pid == 0:
        fsync.__defaults__[0][0] = at
        save(pathlib.Path({folder!r}) / str(at), 2, seed=2)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
def test_a_killed_save_leaves_the_last_good_one(tmp_path):
    moments = range(1, 7)  # a save syncs six times: three files, and the folder after each
    for at in moments:
        (tmp_path / str(at)).mkdir()
        save(tmp_path / str(at), 1, seed=1)
    code = KILLED.format(tests=os.path.dirname(__file__), at=list(moments), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-9"] * len(moments)
    for at in moments:
        found = checkpoint.load("train", tmp_path / str(at))
        # the JSON's rename is the moment at which the new checkpoint counts; the sixth sync comes after it
        assert found.step == (2 if at == 6 else 1)
        expected = tensors(found.step)["shared"]
        assert torch.equal(found.tensors("train", "model")["shared"], expected)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.unlink()], ids=["cut", "flipped bit", "gone"])
def test_damaged_arrays_are_refused(tmp_path, damage):
    save(tmp_path)
    damage(next(tmp_path.glob("model-*.safetensors")))
    found = checkpoint.load("train", tmp_path)
    with pytest.raises(CommandError, match="safetensors: expected"):
        found.tensors("train", "model")


def test_arrays_that_are_no_safetensors_are_refused_even_with_the_right_digest(tmp_path):
    save(tmp_path)
    path = next(tmp_path.glob("model-*.safetensors"))
    # a header length of 2^62: must be refused before anything of that size is allocated
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    record["files"]["model"] |= {"bytes": 10, "sha256": checkpoint._digest(path)}
    (tmp_path / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(CommandError, match="expected safetensors"):
        checkpoint.load("train", tmp_path).tensors("train", "model")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "\xff", '{"format": "other"}', '{"format": "sdm-lite checkpoint 1", "step": "x"}'],
)
def test_a_damaged_json_is_refused(tmp_path, text):
    save(tmp_path)
    (tmp_path / "checkpoint.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CommandError, match=r"checkpoint\.json: expected"):
        checkpoint.load("train", tmp_path)


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path):
    save(tmp_path)
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    record["files"]["model"]["name"] = "../model-000003-0123456789ab.safetensors"
    (tmp_path / "checkpoint.json").write_text(json.dumps(record))
    with pytest.raises(CommandError):
        checkpoint.load("train", tmp_path)


def test_a_missing_checkpoint_names_the_runs_inside(tmp_path):
    (tmp_path / "gdn").mkdir()
    save(tmp_path / "gdn")
    with pytest.raises(CommandError, match="one of the runs inside: gdn"):
        checkpoint.load("generate", tmp_path)
    with pytest.raises(CommandError, match="check the path"):
        checkpoint.load("generate", tmp_path / "nowhere")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits of this kind")
def test_files_have_the_permissions_that_the_user_wants(tmp_path):
    old = os.umask(0o027)
    try:
        save(tmp_path)
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
