"""A HybridState as one safetensors file.

The file holds the tensors of all layers, each MemoryState as the bytes of its own file (rows owned, slots, hashes), the
positions, and as metadata the model's configuration and a SHA-256 of everything else. There is no pickle. Shapes are
checked against the model before a tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DtypeError, FileError, FileFormatError, ValueRangeError, message
from ..fwpkm_state import FwPKMState
from ..memory_state import MemoryState
from ..memory_state import files as memory_files
from ..whole_files import as_path, safetensors_for, unreadable, unwritable, write_whole
from .cache import HybridState
from .state import MixerState, tidy

if TYPE_CHECKING:
    from .hybrid_lm import HybridLM

FORMAT = "sdm-lite cache 1"
_SAVE, _LOAD = "HybridState.save", "HybridState.load"
_DAMAGED = "use another file"
_SIZES = tuple[int, ...]


def save(cache: HybridState, path: Any, of: str | None = None) -> None:
    """Write `cache` to `path` under a temporary name, sync it to the disk and rename it: the old file or the new one.

    Parameters
    ----------
    cache : HybridState
        One that has seen tokens.
    path : path
    of : str or None
        A name of the model's weights, such as a checkpoint's hash; loading asks for the same. None: the SHA-256 of the
        parameters and buffers, which costs a pass over them, about a second a gigabyte.

    Raises
    ------
    DtypeError
        Where `path` is no path, or `of` no string.
    ValueRangeError
        Where there is nothing to save, a call was cut off, or the model that `of` would name is gone.
    FileError
        (an OSError) where the file cannot be written; one that was there before stays.
    BackendError
        Where safetensors is not installed.
    """
    library, path = safetensors_for(_SAVE, "torch"), as_path(_SAVE, "path", path)
    _check_name(_SAVE, of)
    if not cache.layers or cache.recent is None:
        raise ValueRangeError(message(_SAVE, "cache", "a cache that has seen tokens", "an empty one", "decode first"))
    cache.check_whole(_SAVE)
    if of is None:
        model = None if cache._model is None else cache._model()
        if model is None:
            got, fix = "neither `of` nor the model", "pass of=, or keep the model while its caches are in use"
            raise ValueRangeError(message(_SAVE, "of", "a name of the weights", got, fix))
        of = weights_of(model)
    tensors = {"recent": cache.recent, "positions": torch.tensor(cache.positions, dtype=torch.int64)}
    for index, layer in enumerate(cache.layers):
        parts = {"keys": layer.keys, "values": layer.values, **{f"taps.{name}": x for name, x in layer.taps.items()}}
        if isinstance(layer.memory, MemoryState):
            parts["memory_file"] = _bytes_of(layer.memory)
        else:
            parts["memory"] = layer.memory
        if layer.fast is not None:
            parts["fast_file"] = _bytes_of(layer.fast)
        tensors |= {f"layers.{index}.{name}": part for name, part in parts.items() if part is not None}
    whole = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    notes = {"format": FORMAT, "config": json.dumps(cache.config), "of": of}
    notes["sha256"] = _digest(whole, notes)
    try:
        write_whole(path, lambda temporary: library.torch.save_file(whole, temporary, notes))
    except (OSError, library.SafetensorError) as error:
        raise unwritable(_SAVE, path, error) from error


def load(path: Any, model: HybridLM, of: str | None = None) -> HybridState:
    """Return the cache saved in `path`, for `model`.

    Parameters
    ----------
    path : path
    model : HybridLM
        Of the saved configuration and weights.
    of : str or None
        What `save` was given.

    Raises
    ------
    DtypeError
        Where `path` is no path, `model` no HybridLM or `of` no string.
    FileFormatError
        (a ValueError) where the file is damaged, or of another model: both values are named.
    FileError
        (an OSError) where it cannot be read.
    BackendError
        Where safetensors is not installed.
    """
    from .hybrid_lm import HybridLM

    path = as_path(_LOAD, "path", path)
    if not isinstance(model, HybridLM):
        raise DtypeError(message(_LOAD, "model", "a HybridLM", type(model).__name__, "pass the model that it is of"))
    _check_name(_LOAD, of)

    def check(notes: dict[str, str], shapes: dict[str, _SIZES]) -> None:
        _check_format(path, notes, shapes)
        _check_notes(path, notes, model, of)
        _check_shapes(path, shapes, model)

    return _built(path, _read(path, check), model)


def weights_of(model: HybridLM) -> str:
    """Return "sha256:" and the SHA-256 of a model's parameters and buffers, names, dtypes and shapes included."""
    return f"sha256:{_digest(model.state_dict(), {})}"


def _check_name(op: str, of: Any) -> None:
    if not isinstance(of, (str, type(None))):
        fix = "pass a checkpoint's hash, or leave it out"
        raise DtypeError(message(op, "of", "a string that names the weights", f"{of!r:.40}", fix))


def format_of(op: str, path: Path) -> str | None:
    """Return the format that a safetensors file names; raises as :func:`load`, in the name of `op`."""
    with _opened(path, op) as file:
        return (file.metadata() or {}).get("format")


class FileParts(NamedTuple):
    """What a cache's file holds, apart from windows and dense states; layers counted from 0."""

    tokens: list[int]  # of each sequence
    memories: list[tuple[int, memory_files.Contents]]
    fast: list[tuple[int, FwPKMState]]


def parts_of(op: str, path: Path) -> FileParts:
    """Return what a cache's file holds, without its model; raises as :func:`load`, in the name of `op`."""
    tensors = _read(path, lambda notes, shapes: _check_format(path, notes, shapes, op), op)
    memories, fast = [], []
    for index in range(len(tensors)):
        contents = tensors.get(f"layers.{index}.memory_file")
        if contents is not None:
            memories.append((index, _with_file(contents, lambda inner: memory_files.read(op, inner))))
        contents = tensors.get(f"layers.{index}.fast_file")
        if contents is not None:
            fast.append((index, _with_file(contents, lambda inner: FwPKMState.load(inner, kind="torch"))))
    return FileParts(tensors["positions"].tolist(), memories, fast)


@contextmanager
def _opened(path: Path, op: str) -> Iterator[Any]:
    """Open a safetensors file; its faults become FileFormatError and FileError."""
    library = safetensors_for(op, "torch")
    try:
        with library.safe_open(path, framework="pt") as file:
            yield file
    except (library.SafetensorError, UnicodeDecodeError) as error:
        raise _damaged(path, "a safetensors file", "one cut short, or of another kind", op) from error
    except FileError:
        raise
    except OSError as error:
        raise unreadable(op, path, error) from error


def _read(
    path: Path, check: Callable[[dict[str, str], dict[str, _SIZES]], object], op: str = _LOAD
) -> dict[str, Tensor]:
    """Return the tensors of a file, after `check` has seen its metadata and shapes, and held against its hash."""
    with _opened(path, op) as file:
        notes = file.metadata() or {}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        check(notes, shapes)
        tensors = {name: file.get_tensor(name) for name in shapes}
    if _digest(tensors, notes) != notes.get("sha256"):
        raise _damaged(path, "the numbers that were saved", "other numbers", op)
    return tensors


def _built(path: Path, tensors: dict[str, Tensor], model: HybridLM) -> HybridState:
    """Return the cache of tensors whose names and shapes were checked."""
    positions, recent = tensors["positions"], tensors["recent"]
    for name, x, low in (("positions", positions, 0), ("recent", recent, -1)):
        if x.dtype != torch.int64 or (x.numel() and int(x.min()) < low):
            raise _damaged(path, f"{name} as int64 from {low}", f"{x.dtype} from {x.min() if x.numel() else 'nothing'}")
    longest = int(positions.max()) if positions.numel() else 0
    layers = []
    for index, block in enumerate(_blocks(model)):
        prefix = f"layers.{index}."
        mine = {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
        taps = {name[len("taps.") :]: x for name, x in mine.items() if name.startswith("taps.")}
        layer = MixerState(tidy(positions), mine.get("memory"), taps, mine.get("keys"), mine.get("values"))
        if layer.keys is not None and positions.numel():
            window = block.mixer.window
            wanted = longest if window is None else min(longest, window - 1)
            if layer.keys.shape[2] != wanted:
                raise _damaged(path, f"{wanted} cached tokens in layer {index + 1}", str(layer.keys.shape[2]))
        if "memory_file" in mine:
            layer.memory = _memory_of(mine["memory_file"], block.mixer)
            if layer.memory.tokens.tolist() != positions.tolist():
                got = str(layer.memory.tokens.tolist())
                raise _damaged(path, f"{positions.tolist()} tokens in the memory of layer {index + 1}", got)
        if "fast_file" in mine:
            layer.fast = _fast_of(path, mine["fast_file"], block.fwpkm, index)
        layers.append(layer)
    return HybridState(layers, recent, model.config, _model=weakref.ref(model))


def _check_format(path: Path, notes: dict[str, str], shapes: dict[str, _SIZES], op: str = _LOAD) -> None:
    if notes.get("format") != FORMAT or "positions" not in shapes:
        raise _damaged(path, f"format {FORMAT!r}", repr(notes.get("format")), op)


def _check_notes(path: Path, notes: dict[str, str], model: HybridLM, of: str | None) -> None:
    """Raise unless the metadata are those of a cache of this model."""
    try:
        config = json.loads(notes["config"])
        stored = {name: config[name] for name in config}
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, "a model's configuration", str(error)) from error
    wanted = json.loads(json.dumps(model.config))
    for name in {**wanted, **stored}:
        if stored.get(name) != wanted.get(name):
            expected, got = (f"{name} = {one.get(name)!r}" for one in (wanted, stored))
            raise FileFormatError(message(_LOAD, str(path), expected, got, "load it with the model that it is of"))
    wanted_name = weights_of(model) if of is None else of
    if notes.get("of") != wanted_name:
        expected, got = (f"a cache of weights {one or 'without a name'}" for one in (wanted_name, notes.get("of")))
        raise FileFormatError(message(_LOAD, str(path), expected, got, "load it with the weights that it is of"))


def _check_shapes(path: Path, shapes: dict[str, _SIZES], model: HybridLM) -> None:
    """Raise unless the tensors are those that the model's layers have, before one is read."""
    batch = shapes.get("recent", (0,))[0]
    expected: dict[str, tuple[int | None, ...]] = {"recent": (batch, 3), "positions": (batch,)}
    for index, block in enumerate(_blocks(model)):
        parts = layer_shapes(block.mixer, block.kind, batch)
        if block.kind == "sdm":  # dense, copy-on-write, or not there where nothing was written
            kept = [name for name in ("memory", "memory_file") if f"layers.{index}.{name}" in shapes][:1]
            parts = {name: parts[name] for name in parts if not name.startswith("memory") or name in kept}
        if block.fwpkm is not None:
            parts["fast_file"] = (None,)
        expected |= {f"layers.{index}.{name}": shape for name, shape in parts.items()}
    for name in {**expected, **shapes}:
        wanted, shape = expected.get(name), shapes.get(name)
        if wanted is None or shape is None or len(wanted) != len(shape):
            raise _damaged(path, f"{name} of shape {wanted}", f"shape {shape}")
        if any(size is not None and size != got for size, got in zip(wanted, shape)):
            raise _damaged(path, f"{name} of shape {wanted}", f"shape {shape}")


def _blocks(model: HybridLM) -> Iterable[Any]:
    return model.blocks


def layer_shapes(mixer: Any, kind: str, batch: int) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of what a layer of a kind may carry; None: any size."""
    if kind in ("swa", "full"):
        keys = (batch, mixer.num_kv_heads, None, mixer.head_dim)
        return {"keys": keys, "values": keys}
    shapes: dict[str, tuple[int | None, ...]] = {}
    for name, conv in mixer.convs.items():
        if kind == "sdm" and not mixer.write and name != "read":  # the layer that only reads has no others
            continue
        channels, _, width = conv.weight.shape
        shapes[f"taps.{name}"] = (batch, width - 1, channels)
    if kind == "gdn":
        shapes["memory"] = (batch, mixer.num_heads, mixer.head_k_dim, mixer.head_v_dim)
    if kind == "sdm":
        shapes |= {"memory": (batch, *mixer.initial_memory().shape), "memory_file": (None,)}
    return shapes


def _bytes_of(memory: MemoryState | FwPKMState) -> Tensor:
    """Return the file of a state as uint8 [n]."""
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "memory.safetensors"
        memory.save(inner)
        return torch.frombuffer(bytearray(inner.read_bytes()), dtype=torch.uint8)


def _with_file(contents: Tensor, use: Callable[[Path], Any]) -> Any:
    """Return what `use` makes of a file with these bytes [n]."""
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder) / "memory.safetensors"
        inner.write_bytes(contents.numpy().tobytes())
        return use(inner)


def _memory_of(contents: Tensor, mixer: Any) -> MemoryState:
    """Return the MemoryState whose file `contents` is."""
    dtype = mixer.initial_memory().dtype
    return _with_file(contents, lambda inner: MemoryState.load(inner, initial=mixer.memory_origin(), dtype=dtype))


def _fast_of(path: Path, contents: Tensor, layer: Any, index: int) -> FwPKMState:
    """Return the FwPKMState whose file `contents` is, of the shapes of `layer`."""
    fast = _with_file(contents, lambda inner: FwPKMState.load(inner, kind="torch"))
    wanted = [tuple(layer.keys.shape), tuple(layer.values.shape)]
    got = [tuple(shape) for shape in fast.lane_shapes()]
    if got != wanted:
        raise _damaged(path, f"fast weights {wanted} in layer {index + 1}", str(got))
    return fast


def _digest(tensors: dict[str, Tensor], notes: dict[str, str]) -> str:
    """Return the SHA-256 of the metadata but itself, and of names, dtypes, shapes and bits."""
    covered = {name: text for name, text in notes.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, expected: str, got: str, op: str = _LOAD) -> FileFormatError:
    return FileFormatError(message(op, str(path), expected, got, _DAMAGED))
