"""A small language model: sliding-window attention with a global mixer in every few layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DtypeError, SdmError, ValueRangeError, message
from .attention import FullAttention, SlidingWindowAttention
from .blocks import Block, NgramEmbedding
from .cache import HybridState
from .checks import check_vectors
from .gated_delta_net import GatedDeltaNet
from .gates import choose
from .generate import generate
from .memory_layers import MEMORIES, build_layer, layers_with, memories_of
from .ragged import Aligned, aligned_by, check_padded_ids, last_columns
from .short_conv import GatedShortConv
from .sparse_delta_memory import SparseDeltaMemory
from .state import MixerState, refuse_gradients

_NAME = "HybridLM"
KINDS = ("sdm", "gdn", "conv", "swa", "full")
MIXERS = {
    "sdm": SparseDeltaMemory,
    "gdn": GatedDeltaNet,
    "conv": GatedShortConv,
    "swa": SlidingWindowAttention,
    "full": FullAttention,
}
HASH_IDS = ("position", "token", "previous")

_SHARED = {"conv": 4, "conv_init": "mix", "key_init": "shared", "decay_init": "slow", "output_gate": "silu"}
#: what small models need to learn at all, for `options`; docs/layers.md has the measurements
SMALL_MODEL_OPTIONS = {
    "sdm": {**_SHARED, "score_norm": "rms", "score_scale": 1.0},
    "gdn": dict(_SHARED),
}


torch.serialization.add_safe_globals([HybridState])  # as MixerState


class HybridLM(nn.Module):
    """A causal language model whose layers are sliding-window attention and a global mixer, 3:1 by default::

        x = embedding(ids) [+ hashed n-grams];   per layer  x += mixer(norm(x)),  x += mlp(norm(x));   head(norm(x))

    Parameters
    ----------
    vocab_size, dim, num_layers : int
    mixer : {"sdm", "gdn", "conv", "swa", "full"}
        The global mixer.
    mixer_every : int
        Every so-manieth layer is the mixer, the others are "swa".
    layers : sequence of kinds or None
        Every layer by name, instead of the pattern: ("conv", "sdm").
    num_heads, num_kv_heads, window : int
        Of the attention layers.
    slots_per_head, num_writes, num_reads : int
        Of the sparse memories.
    mixer_heads : int
        Heads of "sdm" and "gdn" layers.
    options : mapping of kind to mapping
        Further arguments of the layers of a kind: {"sdm": {"conv": 4}}. `SMALL_MODEL_OPTIONS` is a good start.
    mlp_hidden : int or None
        0: no MLP; None: 2 * dim.
    tie_embeddings, zero_head : bool
        Tie the head to the embedding; or start an untied head at zero.
    embedding_std : float
    head_gain : float
        Gain of the last norm at the start. Logits of a tied head start with std head_gain * embedding_std * sqrt(dim);
        far above 1, training begins with unlearning them.
    ngram_buckets : int
        Rows for each of the hashed 2-, 3- and 4-gram embeddings; 0: none.
    hash_ids : {"position", "token", "previous"}
        What "hash" addressing hashes; "previous": the previous token for writes and the token for reads.
    memory : sequence of "fwpkm@LAYERS" and "pkm@LAYERS"
        Layers, counted from 1, that have an :class:`FwPKM` before the token mixer, or a :class:`ProductKeyMemory` in
        the MLP's place: ("fwpkm@1,3", "pkm@2"). `options` has their arguments, {"fwpkm": {"sub_keys": 32}}.

    Raises
    ------
    ValueRangeError
        On sizes that do not fit each other or an unknown choice.

    Examples
    --------
    >>> model = HybridLM(256, 16, 4, num_heads=2, slots_per_head=16, num_writes=4, num_reads=4)
    >>> [block.kind for block in model.blocks], HybridLM(**model.config).config == model.config
    (['swa', 'swa', 'swa', 'sdm'], True)
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        num_layers: int,
        *,
        mixer: str = "sdm",
        mixer_every: int = 4,
        layers: Sequence[str] | None = None,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        window: int = 128,
        slots_per_head: int = 1024,
        num_writes: int = 64,
        num_reads: int = 64,
        mixer_heads: int = 1,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        mlp_hidden: int | None = None,
        tie_embeddings: bool = True,
        zero_head: bool = False,
        embedding_std: float = 0.02,
        head_gain: float = 1.0,
        ngram_buckets: int = 0,
        hash_ids: str = "position",
        memory: Sequence[str] = (),
    ) -> None:
        super().__init__()
        given = dict(locals())
        self.config: dict[str, Any] = {name: given[name] for name in given if name not in ("self", "__class__")}
        self.config["layers"] = kinds = layer_kinds(num_layers, mixer, mixer_every, layers)
        self.config["options"] = {kind: dict(extra) for kind, extra in (options or {}).items()}
        self.config["memory"] = [memory] if isinstance(memory, str) else list(memory)
        self._check()
        self.hash_ids = hash_ids
        hidden = 2 * dim if mlp_hidden is None else mlp_hidden
        self.embedding = nn.Embedding(vocab_size, dim)
        self.ngrams = NgramEmbedding(ngram_buckets, dim) if ngram_buckets else None
        memories = memories_of(dim, self.config["memory"], self.config["options"], num_layers)
        self.blocks = nn.ModuleList(
            Block(dim, kind, self._mixer(kind), hidden, extra) for kind, extra in zip(kinds, memories)
        )
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = None if tie_embeddings else nn.Linear(dim, vocab_size, bias=False)
        nn.init.constant_(self.norm.weight, head_gain)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        if self.ngrams is not None:
            nn.init.normal_(self.ngrams.table.weight, std=embedding_std)
        if zero_head and self.head is not None:
            nn.init.zeros_(self.head.weight)
        for block in cast(list[Block], self.blocks):
            block.scale_outputs((2 * num_layers) ** -0.5)

    def _check(self) -> None:
        config, op = self.config, _NAME
        choose(op, "hash_ids", config["hash_ids"], HASH_IDS)
        for kind in config["options"]:
            choose(op, "options", kind, (*KINDS, *MEMORIES))
        layers_with(op, config["memory"], config["num_layers"])
        if config["zero_head"] and config["tie_embeddings"]:
            got = "zero_head=True with tie_embeddings=True"
            raise ValueRangeError(message(op, "zero_head", "an untied head", got, "set tie_embeddings=False"))
        for name in ("vocab_size", "dim", "num_layers"):
            if config[name] < 1:
                raise ValueRangeError(message(op, name, "at least 1", str(config[name]), f"raise {name}"))

    def _mixer(self, kind: str) -> nn.Module:
        """Return a new layer of a kind."""
        config = self.config
        attention = {"num_heads": config["num_heads"], "num_kv_heads": config["num_kv_heads"]}
        sizes: dict[str, dict[str, Any]] = {
            "sdm": {
                "num_heads": config["mixer_heads"],
                **{name: config[name] for name in ("slots_per_head", "num_writes", "num_reads")},
            },
            "gdn": {"num_heads": config["mixer_heads"], "head_v_dim": config["dim"] // config["mixer_heads"]},
            "conv": {},
            "swa": {**attention, "window": config["window"]},
            "full": attention,
        }
        options = {**sizes[kind], **config["options"].get(kind, {})}
        return build_layer(_NAME, MIXERS[kind], kind, config["dim"], options)

    def forward(
        self,
        ids: Tensor,
        state: HybridState | None = None,
        *,
        return_state: bool | None = None,
        inplace: bool = False,
        update: bool = True,
        mask: Tensor | None = None,
    ) -> Any:
        """Return logits [B, T, vocab_size], or (logits, state) if a state was passed or asked for.

        Parameters
        ----------
        ids : Tensor int [B, T]
        state : HybridState or None
            What the previous call returned, or ``HybridState()``: the tokens then follow those seen before.
        return_state : bool or None
            None: if a state was passed.
        inplace : bool
            Update the passed state itself instead of making another; no gradients. A state whose memories are
            MemoryStates, as those of a decoding cache are, is always updated.
        update : bool
            Whether fast-weight memories write; False: they are read only.
        mask : Tensor bool [B, T] or None
            False for padding, at any place: no layer reads or writes it, it has no position, its id does not matter,
            and its logits are those of a zero vector. The tokens give what they give alone, to rounding
            (docs/decoding.md). Not inside of ``torch.compile(fullgraph=True)``: the work depends on the lengths.

        Raises
        ------
        DtypeError, ShapeError, DeviceError
            Where ids or state do not fit the model.
        ValueRangeError
            For an id outside of the vocabulary (seen on the CPU and outside of compiled graphs), `inplace` without a
            state, a state of another model, or in place where a gradient would be needed. An error before the first
            layer has moved changes nothing; after one that cut a call off, the state only takes a rollback.
        """
        hand_back = state is not None if return_state is None else return_state
        x, after = self.features(ids, state, return_state=hand_back, inplace=inplace, update=update, mask=mask)
        return (self.logits(x), after) if hand_back else self.logits(x)

    def features(
        self,
        ids: Tensor,
        state: HybridState | None = None,
        *,
        return_state: bool = False,
        inplace: bool = False,
        update: bool = True,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, HybridState | None]:
        """Return (the vectors [B, T, dim] that the head sees, the state or None), as :meth:`forward`.

        With :meth:`logits` of a part of them, a loss on a few positions saves most of the head's work.
        """
        _check_state(state, inplace)
        state = HybridState() if state is None else state
        inplace = inplace or any(True for _ in state.memories())
        ids, aligned = self._aligned(ids, mask, update and (return_state or inplace))
        before = state.config, state._model
        state.bind(self, ids.shape[0])
        lengths = None if aligned is None else aligned.lengths
        after: HybridState | None = state
        if inplace:
            refuse_gradients("HybridLM", "state", self)
            try:
                with state.whole_calls(_NAME):
                    x = self._update(ids, state, update, lengths)
            except BaseException:
                if not state.layers:  # taken back: the cache is as free as it was
                    state.config, state._model = before
                raise
        else:
            x, hash_ids, recent = self.embed(ids, state.recent, lengths)
            layers: list[Any] = []
            x = self._through(x, state, hash_ids, layers, return_state, lengths, inplace=False, update=update)
            x, after = self.norm(x), HybridState(layers, recent, self.config, state.max_bytes, _model=state._model)
            if return_state:
                after.check_room(_NAME)
        if aligned is not None and mask is not None:
            x = aligned.put_back(x, mask.shape[1])
        return x, after if return_state else None

    def _aligned(self, ids: Tensor, mask: Any, keeps_writes: bool) -> tuple[Tensor, Aligned | None]:
        """Check `ids` and `mask`; where there is padding, return the ids with the tokens first, and where they were."""
        ids = check_padded_ids(_NAME, ids, mask, self.config["vocab_size"], self.embedding.weight.device)
        aligned = None if mask is None else aligned_by(mask)
        if aligned is None:
            return ids, None
        if keeps_writes and any(block.fwpkm is not None for block in self.blocks):
            # an open chunk is one for the batch: shorter sequences would close theirs early
            got, fix = "padding", "pass prompts of one length, or update=False"
            expected = "no padding where fast weights write and the state is kept"
            raise ValueRangeError(message(_NAME, "mask", expected, got, fix))
        return ids.gather(1, aligned.order), aligned

    def _through(
        self,
        x: Tensor,
        state: HybridState,
        hash_ids: Any,
        after: list[Any],
        return_state: bool,
        lengths: Tensor | None,
        *,
        inplace: bool,
        update: bool,
    ) -> Tensor:
        """Return x behind all layers; each appends its state to `after`."""
        # a state in place exists, if only as one that stands before the first token
        before: list[Any] = list(state.layers) or [MixerState() if inplace else None for _ in self.blocks]
        for index, block in enumerate(self.blocks):
            x, one = block(x, before[index], hash_ids, return_state, inplace, update, lengths)
            after.append(one)
        return x

    def _update(self, ids: Tensor, state: HybridState, update: bool, lengths: Tensor | None) -> Tensor:
        """Return the features and move `state` on."""
        x, hash_ids, recent = self.embed(ids, state.recent, lengths)
        after: list[Any] = []
        try:
            x = self._through(x, state, hash_ids, after, True, lengths, inplace=True, update=update)
        except BaseException as error:
            # what a layer refuses, it refuses before it moves
            state.interrupted = bool(state.layers) and (bool(after) or not isinstance(error, SdmError))
            raise
        state.layers, state.recent = after, recent
        return self.norm(x)

    def embed(self, ids: Tensor, recent: Tensor | None, lengths: Tensor | None = None) -> tuple[Tensor, Any, Tensor]:
        """Return what enters the first layer [B, T, dim], what "hash" addressing hashes, and the last three tokens."""
        recent = ids.new_full((ids.shape[0], 3), -1).long() if recent is None else recent
        x = self.embedding(ids)
        if self.ngrams is not None:
            x = x + self.ngrams(ids, recent)
        seen = torch.cat([recent, ids], dim=1)
        last = seen[:, -3:] if lengths is None else last_columns(seen, 3, ids.shape[1] - lengths)
        return x, self._hash_ids(ids, recent), last

    def logits(self, features: Tensor) -> Tensor:
        """Return logits [..., vocab_size] of features [..., dim]."""
        check_vectors(_NAME, features, self.config["dim"], self.embedding.weight, rank=None, name="features")
        return F.linear(features, self.embedding.weight) if self.head is None else self.head(features)

    def _hash_ids(self, ids: Tensor, recent: Tensor) -> Any:
        if self.hash_ids == "position":
            return None
        previous = torch.cat([recent[:, -1:].to(ids.dtype), ids], dim=1)[:, :-1]
        return ids if self.hash_ids == "token" else (previous, ids)

    def generate(
        self,
        ids: Tensor | Sequence[Any],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int | None = None,
        num_beams: int = 1,
        speculative: bool | str = False,
        cache: HybridState | None = None,
        update: bool = True,
        mask: Tensor | None = None,
    ) -> Any:
        """Continue `ids` token by token, each step from the layers' states: see :func:`sdm_lite.nn.generate`."""
        return generate(
            self,
            ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            num_beams=num_beams,
            speculative=speculative,
            cache=cache,
            update=update,
            mask=mask,
        )


def _check_state(state: Any, inplace: bool) -> None:
    """Raise unless `state` is None or a HybridState; whether it fits is for its `bind` to say."""
    if state is None:
        if inplace:
            fix = "pass a HybridState, or inplace=False"
            raise ValueRangeError(message(_NAME, "inplace", "a state to update in place", "state=None", fix))
    elif not isinstance(state, HybridState):
        kind, fix = type(state).__name__, "pass what the previous call returned, or HybridState()"
        raise DtypeError(message(_NAME, "state", "a HybridState", kind, fix))


def layer_kinds(num_layers: int, mixer: str, mixer_every: int, layers: Sequence[str] | None) -> list[str]:
    """Return the kind of each layer, or raise ValueRangeError."""
    op = _NAME
    choose(op, "mixer", mixer, KINDS)
    if layers is None:
        if not 1 <= mixer_every <= num_layers:
            expected, fix = f"1 to num_layers = {num_layers}", "set mixer_every (4 by default), or name the layers"
            raise ValueRangeError(message(op, "mixer_every", expected, str(mixer_every), fix))
        return [mixer if index % mixer_every == 0 else "swa" for index in range(1, num_layers + 1)]
    for kind in layers:
        choose(op, "layers", kind, KINDS)
    if len(layers) != num_layers:
        expected = f"num_layers = {num_layers} names"
        raise ValueRangeError(message(op, "layers", expected, str(list(layers)), "change either"))
    return list(layers)
