"""Runs a `spec.Model` one step at a time: all layers in one call of the kernels' C interface."""

from __future__ import annotations

import ctypes
import weakref
from functools import cache as remember
from types import ModuleType
from typing import Any

import torch

from hfpatch.capi.library import Caller
from hfpatch.capi.signatures import CONSTANTS
from hfpatch.capi.tensors import DLTensor, HfpTensorList
from hfpatch.decoding.arguments import Arguments, Unsupported, describe
from hfpatch.decoding.greedy import Chain, Chooser, Ends
from hfpatch.decoding.spec import CacheTable, Model
from hfpatch.errors import DecodingError, HfpatchError

Tensor = torch.Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def unsupported(
    model: Model,
    rows: int,
    device: torch.device | str | None = None,
    tokens: int = 1,
    *,
    package: ModuleType | None = None,
) -> str | None:
    """Why `Engine(model, rows, tokens)` cannot be made, or None; names what stands in the way.

    Args:
        model: the description.
        rows: sequences in a step.
        device: where it is to run; default: where the model lies.
        tokens: new tokens of each row in a step.
        package: the kernels' module; default: the local build.
    """
    try:
        if device is not None and torch.device(device).type != model.device.type:
            raise DecodingError(f"`device`: the model lies on {model.device}, expected {device}")
        if model.whole:
            Call(model, rows, tokens, package)
        else:
            from hfpatch.decoding.halves import HalvesEngine

            HalvesEngine(model, rows, tokens, package=package)
    except DecodingError as e:
        return str(e)
    return None


class Engine:
    """Runs steps of `rows` sequences with `tokens` new tokens each.

    It holds the model's tensors as they lie in it; nothing is copied. On CUDA the kernels are
    captured in a graph at the first step, and replayed for every length and cache after.

    Args:
        model: the description.
        rows: sequences in a step.
        tokens: new tokens of each row in a step.
        package: the kernels' module; default: the local build.

    Raises:
        DecodingError: what `unsupported` says.
    """

    def __init__(
        self, model: Model, rows: int, tokens: int = 1, *, package: ModuleType | None = None
    ) -> None:
        self.model, self.rows, self.tokens = model, rows, tokens
        self._device = model.device
        #: The step's CUDA graphs, `graph.StepGraphs`; None on a CPU.
        self.graphs: Any = None
        with torch.inference_mode(False):  # else it could be written to under that mode alone
            self._build(package)
        self._choosers: dict[Ends | None, Chooser] = {}  # on a CPU
        self._shape = (rows, tokens)
        self._state = (rows, tokens, model.embedding.shape[1])
        vocab = model.head.weight.shape[0]
        self._logits_shapes = ((rows, tokens, vocab), (rows, 1, vocab))
        self._logits_dtypes = (model.dtype, torch.float32)

    def _build(self, package: ModuleType | None) -> None:
        model, rows, tokens = self.model, self.rows, self.tokens
        self._call = Call(model, rows, tokens, package)
        self._table = Table(model, rows, tokens)
        if model.device.type == "cuda":
            from hfpatch.decoding.graph import StepGraphs

            self.graphs = StepGraphs(self._call, self._table)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the model's tensors lay when the engine was made: what it reads."""
        return self._call.addresses

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory that the engine holds."""
        held: Tensor = self._call.workspace
        more = self.graphs.bytes if self.graphs is not None else 0
        return int(held.numel()) * held.element_size() + int(more)

    def step(
        self,
        ids: Tensor | None,
        positions: Tensor,
        cache: CacheTable,
        logits: Tensor,
        mask: Tensor | None = None,
        embeds: Tensor | None = None,
        hidden: Tensor | None = None,
        chain: Chain | None = None,
    ) -> None:
        """Write the new keys and values into `cache`, and the new tokens' logits.

        `cache.length` stays as it is: who calls adds `tokens`.

        Args:
            ids: int64 `[rows, tokens]`; may be None with `embeds`.
            positions: int64 `[rows, tokens]`.
            cache: memory for at least `length + tokens` keys, of the model's dtype and device.
            logits: written; `[rows, tokens, vocab]`, or `[rows, 1, vocab]` for the last token's
                alone; contiguous, fp32 or the model's dtype.
            mask: bool, uint8 or int64 `[rows, keys]` with `length + tokens` keys or more; 0: a key
                that is not seen. A query sees no later key and none before its window in any case.
            embeds: `[rows, tokens, hidden]`, instead of the ids' embeddings.
            hidden: written: the final norm's result, `[rows, tokens, hidden]`.
            chain: the text whose tokens are chosen as well, by `chooser(chain.ends)`; with one
                token a row. `accept` is up to who calls. Its mask has ones behind each call's.

        Raises:
            DecodingError: an argument that does not fit; nothing was written.
        """
        shape, state = self._shape, self._state
        if ids is None and embeds is None:
            raise DecodingError("`ids`: expected a tensor where `embeds` is None, got None")
        if embeds is not None:
            self._check("embeds", embeds, (self.model.dtype,), (state,))
        else:
            self._check("ids", ids, (torch.int64,), (shape,))
        self._check("positions", positions, (torch.int64,), (shape,))
        self._check("logits", logits, self._logits_dtypes, self._logits_shapes)
        if hidden is not None:
            self._check("hidden", hidden, (self.model.dtype,), (state,))
        mask = self._mask(mask, cache.length + self.tokens)
        positions = positions.contiguous()
        ids = None if embeds is not None or ids is None else ids.contiguous()
        embeds = None if embeds is None else embeds.contiguous()
        if chain is not None and self.tokens != 1:
            raise DecodingError(f"`chain`: expected one token a row, got {self.tokens}")
        self._run(ids, positions, cache, logits, mask, embeds, hidden, chain)

    def logits(self) -> Tensor:
        """Where the steps of a chain write their logits `[rows, 1, vocab]`, of the model's dtype:
        the next step writes there too."""
        if self.graphs is not None:
            found: Tensor = self.graphs.logits(self.model.dtype)
            return found
        return torch.empty(self._logits_shapes[1], dtype=self.model.dtype, device=self._device)

    def chooser(self, ends: Ends | None) -> Chooser:
        """What chooses the tokens of texts that end so."""
        if self.graphs is not None:
            made: Chooser = self.graphs.chooser(ends)
            return made
        if ends not in self._choosers:
            with torch.inference_mode(False):
                ids = torch.zeros(self._shape, dtype=torch.int64, device="cpu")
                self._choosers[ends] = Chooser(self._call, ids, torch.zeros_like(ids[:0]), ends)
        return self._choosers[ends]

    def _run(
        self,
        ids: Tensor | None,
        positions: Tensor,
        cache: CacheTable,
        logits: Tensor,
        mask: Tensor | None,
        embeds: Tensor | None,
        hidden: Tensor | None,
        chain: Chain | None,
    ) -> None:
        self._table.take(cache)
        if self.graphs is not None:
            self.graphs.run(ids, positions, logits, mask, embeds, hidden, chain)
            return
        self._call(logits, hidden, self._table.entries, ids, embeds, positions, mask)
        if chain is not None:
            chooser = self.chooser(chain.ends)
            chooser.begin(chain)
            chooser.launch(logits)
            chain.launched()

    def _check(
        self,
        name: str,
        tensor: Tensor | None,
        dtypes: tuple[torch.dtype, ...],
        shapes: tuple[tuple[int, ...], ...],
    ) -> None:
        if not isinstance(tensor, Tensor):
            raise DecodingError(f"`{name}`: expected a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in dtypes:
            wanted = " or ".join(str(d) for d in dict.fromkeys(dtypes))
            raise DecodingError(
                f"`{name}`: expected {wanted}, got {tensor.dtype}; convert it first"
            )
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(str(list(s)) for s in dict.fromkeys(shapes))
            raise DecodingError(f"`{name}`: expected shape {wanted}, got {list(tensor.shape)}")
        if tensor.device != self._device:
            raise DecodingError(
                f"`{name}`: expected it on {self.model.device}, got {tensor.device}; move it there"
            )
        if name in ("logits", "hidden") and not tensor.is_contiguous():
            raise DecodingError(f"`{name}`: expected a contiguous tensor, got a strided one")

    def _mask(self, mask: Tensor | None, keys: int) -> Tensor | None:
        if mask is None:
            return None
        if mask.dtype not in (torch.bool, torch.uint8, torch.int64, torch.int32):
            raise DecodingError(f"`mask`: expected bool, uint8 or int64, got {mask.dtype}")
        if mask.ndim != 2 or mask.shape[0] != self.rows or mask.shape[1] < keys:
            raise DecodingError(
                f"`mask`: expected shape [{self.rows}, {keys} or more], got {list(mask.shape)}"
            )
        if mask.device != self.model.device:
            raise DecodingError(
                f"`mask`: expected it on {self.model.device}, got {mask.device}; move it there"
            )
        if self.graphs is not None:
            return mask  # it is copied into one of bool
        if mask.dtype not in (torch.bool, torch.uint8):
            mask = mask != 0
        return mask.contiguous()


class Call:
    """`hfp_decode_step` with what does not change from step to step."""

    def __init__(
        self, model: Model, rows: int, tokens: int, package: ModuleType | None = None
    ) -> None:
        if model.dtype not in _DTYPES:
            raise DecodingError(
                f"`embedding`: expected {', '.join(map(str, _DTYPES))}, got {model.dtype}"
            )
        if model.device.type not in ("cpu", "cuda"):
            raise DecodingError(f"`embedding`: no kernels for device {model.device}")
        self.model, self.rows, self.tokens = model, rows, tokens
        self._caller = _library(package)
        try:
            arguments = Arguments(model)
        except Unsupported as e:
            raise DecodingError(str(e)) from e
        self.addresses = arguments.addresses
        # ctypes' structures point into one another, and those into the tensors' memory
        self._keep: list[Any] = [arguments]
        views = [None if t is None else describe(t) for t in arguments.tensors]
        pointer = ctypes.POINTER(DLTensor)
        pointers = (pointer * len(views))(
            *(pointer() if v is None else ctypes.pointer(v) for v in views)
        )
        self._list = HfpTensorList(ctypes.cast(pointers, ctypes.POINTER(pointer)), len(views))
        self._keep += [views, pointers]
        self._function = self._caller.function("hfp_decode_step")
        self._threads = 0
        self._rows_workspace: Tensor | None = None  # of `choose`
        self.workspace = torch.empty(0, device="cpu")
        self._make_workspace()

    def _make_workspace(self) -> None:
        threads = torch.get_num_threads() if self.model.device.type == "cpu" else 0
        if self.workspace.numel() > 0 and threads == self._threads:
            return
        size = self._caller.function("hfp_decode_workspace")
        found = size(ctypes.byref(self._list), self.rows, self.tokens, threads)
        if found < 0:
            raise DecodingError(self._caller.last_error().partition(": ")[2])
        self._threads = threads
        self.workspace = torch.zeros(int(found), dtype=torch.float32, device=self.model.device)
        self._workspace_view = describe(self.workspace)

    def choose(
        self,
        ids: Tensor,
        counters: Tensor | None,
        text: Tensor,
        logits: Tensor,
        ends: Tensor | None,
        pad: int,
    ) -> None:
        """`hfp_decode_choose` on the current stream: each row's greedy token.

        Args:
            ids: written, int64 `[rows]`.
            counters: int64, each gets one more.
            text: int64 `[rows + 3]`, the steps' numbers and the addresses of the text's memory.
            logits: `[rows, 1, vocab]`, contiguous.
            ends: int64, tokens that end a row.
            pad: what stands behind an end.

        Raises:
            DecodingError: what the C function says.
        """
        if self._rows_workspace is None:
            size = self._caller.function("hfp_row_workspace")(logits.shape[0], logits.shape[-1])
            made = torch.empty(int(size), dtype=torch.int64, device=logits.device)
            self._rows_workspace, self._choose = made, self._caller.function("hfp_decode_choose")
        views = [
            None if t is None else ctypes.byref(describe(t))
            for t in (ids, counters, text, self._rows_workspace, logits[:, 0], ends)
        ]
        if self._choose(*views, pad, self._stream()) != CONSTANTS["HFP_OK"]:
            raise DecodingError(self._caller.last_error().partition(": ")[2])

    def _stream(self) -> int | None:
        device = self.model.device
        if device.type != "cuda":
            return None
        found: int = torch.cuda.current_stream(device).cuda_stream
        return found

    def share_workspace(self, other: Call) -> None:
        """Use that of another call of the same device, which is as large or larger."""
        self.workspace, self._workspace_view = other.workspace, other._workspace_view

    def __call__(
        self,
        logits: Tensor | None,
        hidden: Tensor | None,
        table: Tensor,
        ids: Tensor | None,
        embeds: Tensor | None,
        positions: Tensor,
        mask: Tensor | None,
        most_keys: int = 0,
    ) -> None:
        """One step on the current stream.

        Args:
            most_keys: what the keys are at most, this step's among them; 0: not known.

        Raises:
            DecodingError: what the C function says.
        """
        self._make_workspace()
        views = [
            None if t is None else ctypes.byref(describe(t))
            for t in (logits, hidden, table, ids, embeds, positions, mask)
        ]
        status = self._function(
            views[0],
            views[1],
            ctypes.byref(self._workspace_view),
            ctypes.byref(self._list),
            *views[2:],
            most_keys,
            self._threads,
            self._stream(),
        )
        if status != CONSTANTS["HFP_OK"]:
            raise DecodingError(self._caller.last_error().partition(": ")[2])


class Table:
    """The C function's `cache`: how many keys there are, and where each layer's lie.

    Attributes:
        entries: int64 `[1 + 3 * layers]` on the CPU.
        version: another number whenever it points to other memory.
    """

    def __init__(self, model: Model, rows: int, tokens: int) -> None:
        self.model, self.rows, self.tokens = model, rows, tokens
        self.entries = torch.zeros(1 + 3 * len(model.layers), dtype=torch.int64, device="cpu")
        self.version = 0
        self.least = 0
        self._tensors: list[weakref.ref[Tensor]] = []  # a cache's memory goes with the cache
        self._addresses: list[int] = []

    def take(self, cache: CacheTable) -> None:
        """Point to `cache`'s memory.

        Raises:
            DecodingError: its tensors or its length do not fit.
        """
        tensors = [*cache.keys, *cache.values]
        addresses = list(map(Tensor.data_ptr, tensors))
        # a cache's memory goes with the cache: no tensor of it is held here
        same = addresses == self._addresses and all(
            a is b() for a, b in zip(tensors, self._tensors, strict=True)
        )
        if not same:
            self._read(cache, tensors, addresses)
        if cache.length < 0 or cache.length + self.tokens > self.least:
            raise DecodingError(
                f"`cache`: expected room for {cache.length} + {self.tokens} keys, got a capacity "
                f"of {self.least}; grow it"
            )
        self.entries[0] = cache.length

    def _read(self, cache: CacheTable, tensors: list[Tensor], addresses: list[int]) -> None:
        layers = self.model.layers
        self._tensors, self._addresses = [], []
        # first, as an interrupt between two lines may leave the rest for the next step
        self.version += 1
        if not len(cache.keys) == len(cache.values) == len(layers):
            raise DecodingError(
                f"`cache`: expected keys and values of {len(layers)} layers, got "
                f"{len(cache.keys)} and {len(cache.values)}"
            )
        entries = [0]
        for i, layer in enumerate(layers):
            for name, tensor in (("keys", cache.keys[i]), ("values", cache.values[i])):
                self._check(f"cache.{name}[{i}]", tensor, layer.attention)
            if cache.keys[i].shape != cache.values[i].shape:
                raise DecodingError(
                    f"`cache.values[{i}]`: expected the shape of the keys "
                    f"{list(cache.keys[i].shape)}, got {list(cache.values[i].shape)}"
                )
            entries += [addresses[i], addresses[len(layers) + i], cache.keys[i].shape[2]]
        self.entries.copy_(torch.tensor(entries, device="cpu"))
        self.least = min(t.shape[2] for t in tensors)
        self._tensors, self._addresses = list(map(weakref.ref, tensors)), addresses

    def _check(self, name: str, tensor: Tensor, attention: Any) -> None:
        wanted = (self.rows, attention.key_heads, attention.head_dim)
        got = tuple(tensor.shape)
        if tensor.ndim != 4 or (got[0], got[1], got[3]) != wanted:
            raise DecodingError(
                f"`{name}`: expected shape [{wanted[0]}, {wanted[1]}, capacity, {wanted[2]}], got "
                f"{list(got)}"
            )
        if tensor.dtype != self.model.dtype or tensor.device != self.model.device:
            raise DecodingError(
                f"`{name}`: expected {self.model.dtype} on {self.model.device}, got {tensor.dtype} "
                f"on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise DecodingError(f"`{name}`: expected a contiguous tensor, got a strided one")
        if tensor.device.type == "cuda" and tensor.data_ptr() % 16 != 0:
            raise DecodingError(
                f"`{name}`: expected it to begin at a multiple of 16 bytes; copy it"
            )


@remember
def _opened(path: str) -> Caller:
    return Caller(path)


def _library(package: ModuleType | None) -> Caller:
    """The C functions of the kernels' library.

    Raises:
        DecodingError: there are no kernels, or they are older than the decoding step.
    """
    from hfpatch.kernels.sources import local_package

    try:
        module = local_package().module if package is None else package
        caller = _opened(str(module.calls.library()))
        caller.function("hfp_decode_step")
    except (HfpatchError, AttributeError, OSError, RuntimeError, ValueError) as e:
        raise DecodingError(f"no decoding kernels: {e}") from e
    return caller
