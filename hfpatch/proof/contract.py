"""Which calls an adapter may take, proven when the model was patched or at a first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hfpatch.announce import announce_in_call
from hfpatch.ops import KERNEL_DTYPES
from hfpatch.proof.proving import may_prove
from hfpatch.proof.subject import Combo, Forward, Tensor, supported


class Contract:
    """Which calls an adapter may take, and what it does for them: (device, dtypes) -> entry.

    One contract serves every module of equal class, settings and source. What was not proven when
    the model was patched (a device while its weights were still on the CPU, a block's other dtypes)
    is proven at its first call.
    """

    def __init__(
        self,
        name: str,
        prove: Callable[[str, torch.dtype], str | None],
        training: bool,
        *,
        by_dtype: bool = False,
        prove_autocast: Callable[[str, Combo, bool], Any] | None = None,
    ) -> None:
        """`prove(device, dtype)` fills the table of a device, with `by_dtype` for one dtype alone,
        and returns why it cannot. `prove_autocast(device, combo, recorded)` returns the entry of
        one combination under autocast, `recorded` if also its gradients are right, or why there is
        none."""
        self.name = name
        self.training = training
        #: How many dimensions an input may have, where the original does not take any number.
        self.dims: frozenset[int] | None = None
        #: Whether it may have no elements, where `dims` is given.
        self.takes_empty = True
        #: Devices, others than its input's, under whose autocast the original does something else.
        self.autocasts: frozenset[str] = frozenset()
        self.cpu: dict[Any, Forward] = {}
        self.cuda: dict[Any, Forward] = {}
        self.xpu: dict[Any, Forward] = {}
        self._prove = prove
        self._by_dtype = by_dtype
        self._prove_autocast = prove_autocast
        #: Under autocast: device, autocast's dtype, whether autograd may record, and the dtypes of
        #: the call -> the entry, or None for the original.
        self._autocast: dict[tuple[str, torch.dtype, bool, Any], Any] = {}
        #: What `notes` says of these.
        self._outcomes: dict[str, None] = {}
        #: Device, and dtype where proofs are by dtype: why it cannot be served, or None.
        self._proven: dict[tuple[str, torch.dtype | None], str | None] = {}
        self._warned: set[str] = set()

    def table(self, device: str) -> dict[Any, Forward]:
        return {"cpu": self.cpu, "xpu": self.xpu}.get(device, self.cuda)

    def proven(self, device: str, dtype: torch.dtype | None = None) -> None:
        self._proven[device, dtype if self._by_dtype else None] = None

    def takes(self, x: Tensor) -> bool:
        """Whether the original takes an input of so many dimensions, and does now what it did."""
        if self.autocasts and any(
            torch.is_autocast_enabled(other) for other in self.autocasts - {_device_type(x)}
        ):
            return False
        return self.dims is None or (x.dim() in self.dims and (self.takes_empty or x.numel() > 0))

    def late(self, x: Tensor, key: Any) -> Any:
        """Slow path of a call that the tables do not know: prove it, or warn once."""
        device = _device_type(x)
        if device == "xpu" and torch.is_autocast_enabled(device):
            self._warn_once("was called under autocast on xpu; such calls use the original forward")
            return None
        unit = (device, x.dtype if self._by_dtype else None)
        # the forwards look in the tables of the CPU and of CUDA themselves
        if device == "xpu" and (found := self.table(device).get(key)) is not None:
            return found
        if device in ("cpu", "cuda", "xpu") and unit not in self._proven:
            if device == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            with may_prove((self, unit)) as may:
                if not may:
                    return None
                if unit not in self._proven:
                    try:
                        self._proven[unit] = self._prove(device, x.dtype)
                    except torch.OutOfMemoryError:
                        self._warn_once(
                            f"was called where there was no memory to prove its kernel on {device};"
                            " the call uses the original forward, and the next one tries again"
                        )
                        return None
            found = self.table(device).get(key)
            if found is not None:
                return found
        why = self._proven.get(unit) or _unproven(key)
        self._warn_once(
            f"was called with {_describe(key)} on {device}; such calls use the original forward: "
            f"{why}"
        )
        return None

    def elsewhere(self, x: Tensor, key: Any) -> Any:
        """The entry for a call on neither the CPU nor CUDA."""
        return self.late(x, key) if _device_type(x) == "xpu" else None

    def needs_grad(self) -> None:
        """Say once why a call that autograd records is not taken."""
        self._warn_once(
            "was called where autograd records and `mode` is 'inference'; such calls use the "
            "original forward. Use torch.no_grad() or mode='training'"
        )

    def under_autocast(self, x: Tensor, key: Any, recorded: bool = False) -> Any:
        """The entry for a call under autocast, which decides the dtype of each operator in the
        original and so makes it another function; None for the original.

        Args:
            x: the input.
            key: the dtypes of the call, as in the tables.
            recorded: whether autograd may record, so that gradients must be right too.
        """
        if not (x.is_cuda or x.is_cpu):
            return None
        device = "cuda" if x.is_cuda else "cpu"
        unit = (device, torch.get_autocast_dtype(device), recorded, key)
        try:
            return self._autocast[unit]
        except KeyError:
            return self._late_autocast(*unit)

    def _late_autocast(self, device: str, dtype: torch.dtype, recorded: bool, key: Any) -> Any:
        """Prove one combination under autocast, or warn once."""
        if device == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        unit, combo = (device, dtype, recorded, key), Combo(key[0], key[1], dtype)
        if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
            self._warn_once(
                "was called under autocast while hooks on all modules are registered "
                "(FlopCounterMode, `register_module_forward_hook`), which would see the modules of "
                f"its proof; until they are removed calls with {combo} use the original forward",
                about="hooks",
            )
            return None
        with may_prove((self, unit)) as may:
            if not may or unit in self._autocast:
                return self._autocast.get(unit)
            entry: Any = _unproven((*key, dtype))
            if all(map(supported, (*key, dtype))) and self._prove_autocast is not None:
                try:
                    entry = self._prove_autocast(device, combo, recorded)
                except torch.OutOfMemoryError:
                    entry = None
            if entry is not None:
                self._autocast[unit] = None if isinstance(entry, str) else entry
        called = f"{combo} on {device}{' where autograd records' if recorded else ''}"
        if entry is None:
            self._warn_once(
                f"was called where there was no memory to prove its kernel with {called}; the call "
                "uses the original forward, and the next one tries again"
            )
        elif isinstance(entry, str):
            self._outcomes[f"`{self.name}` with {called}: the original, since {entry}"] = None
            self._warn_once(
                f"was called with {called}; such calls use the original forward: {entry}"
            )
        else:
            self._outcomes[f"`{self.name}` with {called}: the kernel"] = None
            return entry
        return None

    def not_under_autocast(self) -> None:
        """Say once that a block, which is proven as a whole, is not fused under autocast."""
        self._outcomes[f"`{self.name}` under autocast: the original, not fused"] = None
        self._warn_once(
            "was called under autocast, which decides the dtype of each operator in it; such calls "
            "use the original forward, not the fused block. Load the model in bf16 "
            "(`dtype=torch.bfloat16`) and call it without autocast"
        )

    def notes(self) -> list[str]:
        """For `status`: what calls under autocast were computed by."""
        return list(self._outcomes)

    def two_dtypes(self, x: Tensor, gate: Tensor) -> None:
        """Say once that an input and its gate must have one dtype, which autocast may change."""
        if "two dtypes" not in self._warned:
            self._warned.add("two dtypes")
            ours, other = (str(t.dtype).removeprefix("torch.") for t in (x, gate))
            what = f"{ours} input and a {other} gate"
            self._outcomes[f"`{self.name}` with {what}: the original"] = None
            self._warn_once(
                f"was called with {what}, as autocast makes them; such calls use the original "
                "forward: its kernel takes one dtype"
            )

    def changed(self) -> None:
        """Say once that a module is not as it was proven."""
        self._warn_once(
            "got other settings, or hooks, processors, forwards, parameters or modules inside, "
            "after it was patched; such calls use the original forward. Call `hfpatch.apply` "
            "again: it, or its parts, are patched then"
        )

    def another_dtype(self, x: Tensor) -> None:
        """Say once why a call in a dtype that is not the module's own is not taken."""
        self._warn_once(
            f"was called with {str(x.dtype).removeprefix('torch.')}, which is not the dtype of its "
            "products; such calls use the original forward",
            about="another dtype",
        )

    def not_covered(self, error: Exception) -> None:
        """Say once why a call with such inputs is not taken."""
        said = (str(error).splitlines() or [type(error).__name__])[0]
        self._warn_once(
            "was called with inputs, or with parameters inside, that its fused block does not "
            f"cover; such calls use the original forward: {said}",
            about=f"not covered {type(error).__name__}",
        )

    def hooks_on_all(self) -> None:
        """Say once why no call is taken while hooks on all modules are registered."""
        self._warn_once(
            "was called while hooks on all modules are registered (FlopCounterMode, "
            "`register_module_forward_hook`), which would not fire for the modules inside; until "
            "they are removed such calls use the original forward",
            about="hooks on all",
        )

    def odd_projections(self) -> None:
        """Say once why a gated product is not taken: each call asks both projections twice."""
        self._warn_once(
            "was called where its projections gave results of two dtypes or shapes, in one memory, "
            "or no tensors; such calls use the original forward"
        )

    def partitioned(self, parameter: str) -> None:
        """Say once why a call with a parameter that is partly elsewhere is not taken."""
        self._warn_once(
            f"has its `{parameter}` partitioned over several processes; such calls use the "
            "original forward",
            about="partitioned",
        )

    def _warn_once(self, message: str, about: str | None = None) -> None:
        """`message` follows the module's name; once of what it is `about`, or of each message."""
        once = about or message
        if once not in self._warned:
            self._warned.add(once)
            announce_in_call(f"{self.name} {message}", stacklevel=4)


def _device_type(x: Tensor) -> str:
    return x.device.type


def _describe(key: Any) -> str:
    return str(Combo(*key)) if isinstance(key, tuple) else str(key)


def _unproven(key: Any) -> str:
    """Why the tables have no entry for dtypes, where nothing failed."""
    without = [t for t in key if not supported(t)] if isinstance(key, tuple) else []
    if without:
        names = ", ".join(str(t).removeprefix("torch.") for t in KERNEL_DTYPES)
        return f"there is no kernel for {str(without[0]).removeprefix('torch.')}, only for {names}"
    return "its kernel was not proven for that"
