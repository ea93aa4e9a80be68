"""Trace the forward of a model symbolically and lower it to a native `Program`.

`lower` calls a forward with a `Value` in place of token ids, and each native operation that is
called with a `Value` records itself. A forward with another operation, for example the choice of a
router, cannot be lowered: the model then runs operation by operation from Python, and `lower`
returns the reason.

    x + attention(norm(x))    norm 0 → 1 · linear 1 → 2 · rope · write_kv · attention 2 → 1 · …
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.native.library import E4M3, TYPES, NativeLibrary, address
from headway.runtime.native.program import CODES, NOWHERE, OPERATION, Pause, Program

GEMMS = ("linear", "quantized")
PAUSE = "pause"


class NotLoweredError(Exception):
    """The model has an operation that a program cannot have."""


class Value:
    """The symbolic result of an operation: `width` columns of a buffer from `first` on, by token.

    `heads` is the number of equal parts after `unflatten`; 0: not divided.
    """

    def __init__(
        self, recorder: "OperationRecorder", buffer: int, width: int, first: int = 0, heads: int = 0
    ) -> None:
        self.recorder, self.buffer = recorder, buffer
        self.width, self.first, self.heads = width, first, heads

    def __getattr__(self, name: str) -> Any:
        raise NotLoweredError(f"`{name}`")

    def __getitem__(self, key: Any) -> Any:
        raise NotLoweredError("choice of columns")

    @property
    def shape(self) -> tuple[float, ...]:
        """The shape as of a tensor, with infinitely many tokens."""
        rest = (self.heads, self.width // self.heads) if self.heads else (self.width,)
        return float("inf"), *rest

    @property
    def dtype(self) -> torch.dtype:
        return self.recorder.dtypes.get(self.buffer, self.recorder.dtype)

    @property
    def dense(self) -> bool:
        """Whether it has all columns of its buffer."""
        return self.width == self.recorder.widths[self.buffer]

    def split(self, sizes: Sequence[int], dim: int) -> list["Value"]:
        assert dim == -1 and not self.heads
        begins = np.cumsum([self.first, *sizes]).tolist()
        pairs = zip(begins, sizes, strict=False)
        return [Value(self.recorder, self.buffer, size, begin) for begin, size in pairs]

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> "Value":
        if dim != -1 or sizes[0] != -1:
            raise NotLoweredError("such heads")
        return Value(self.recorder, self.buffer, self.width, self.first, self.width // sizes[1])

    def flatten(self, start_dim: int) -> "Value":
        assert start_dim == 1
        return Value(self.recorder, self.buffer, self.width, self.first)

    def __add__(self, other: "Value | Tensor") -> "Value":
        if isinstance(other, Tensor):
            raise NotLoweredError("sum by channel")
        return self.recorder.add(self, other, 1.0)

    def __mul__(self, factor: float | Tensor) -> "Value":
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise NotLoweredError("product by channel")
        return self.recorder.add(self, None, float(factor))

    def __truediv__(self, divisor: Any) -> "Value":
        raise NotLoweredError("quotient")

    def float(self) -> "Value":
        """Return the value in fp32."""
        return self if self.dtype == torch.float32 else self.recorder.widen(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.embedding:
            return args[0].recorder.embed(args[1])
        raise NotLoweredError(f"`{getattr(func, '__name__', func)}`")


def recordable(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a method: called with a `Value`, it calls the recorder's method `name` instead."""

    def wrap(operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def either(self: Any, x: Any, *rest: Any, **named: Any) -> Any:
            if isinstance(x, Value):
                return getattr(x.recorder, name)(x, *rest, **named)
            return operation(self, x, *rest, **named)

        return either

    return wrap


class OperationRecorder:
    """Records operations. Each result has a buffer of its own until `program` shares memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.widths: list[int] = []
        self.dtype = dtype
        self.dtypes: dict[int, torch.dtype] = {}
        """Types of buffers that differ from `dtype`."""
        self.given: int | None = None
        """The buffer that the caller provides, if any."""
        self._part: Value | None = None
        """The columns of the next product within `parts`."""
        self._operations: list[dict[str, Any]] = []
        self._scratch_bytes = 0

    def _new(self, width: int, heads: int = 0, like: Value | None = None) -> Value:
        """Return a value in a new buffer, in the type of `like` or the model's type."""
        buffer = len(self.widths)
        self.widths.append(width)
        if like is not None and like.dtype != self.dtype:
            self.dtypes[buffer] = like.dtype
        return Value(self, buffer, width, 0, heads)

    def _write(self, code: str, **fields: Any) -> None:
        self._operations.append({"code": code, **fields})

    def give(self, width: int) -> Value:
        """Return the value of rows that the caller provides; they are only read."""
        x = self._new(width)
        self.given = x.buffer
        return x

    def embed(self, weight_VH: Tensor) -> Value:
        count, width = weight_VH.shape
        y = self._new(width)
        self._write("embed", y=y, weight=address(weight_VH), width=width, count=count)
        return y

    def rms_norm(self, x: Value, weight_H: Tensor, eps: float, offset: float = 0.0) -> Value:
        assert weight_H.dtype == x.dtype
        y, heads = self._new(x.width, x.heads), max(1, x.heads)
        numbers = {"width": x.width // heads, "count": heads, "factor": eps, "shift": offset}
        self._write("norm", x=x, y=y, weight=address(weight_H), **numbers)
        return y

    def linear(self, x: Value, weight: Any, bias_O: Tensor | None) -> Value:
        scratch_bytes = 4 * weight.padded
        weight_type = TYPES[weight.dtype]
        return self._gemm("linear", x, weight, bias_O, scratch_bytes, weight_type=weight_type)

    def linear_fp8(self, x: Value, weight: Any, bias_O: Tensor | None) -> Value:
        numbers = {"scales": address(weight.scales), "layout": weight.group, "weight_type": E4M3}
        return self._gemm("linear", x, weight, bias_O, 4 * weight.padded, **numbers)

    def quantized(self, x: Value, weight: Any, bias_O: Tensor | None) -> Value:
        numbers = {"scales": address(weight.scales), "layout": weight.layout}
        numbers["order"] = address(weight.order)
        return self._gemm("quantized", x, weight, bias_O, weight.scratch_bytes, **numbers)

    def parts(self, x: Value, weight: Any, bias_O: Tensor | None) -> Value:
        """Multiply the same rows by several kernels; their outputs are adjacent columns."""
        sizes = [matrix.outputs for matrix in weight.matrices]
        y = self._new(sum(sizes), like=x)
        biases = [None] * len(sizes) if bias_O is None else bias_O.split(sizes)
        places = zip(weight.kernels, weight.matrices, biases, y.split(sizes, -1), strict=True)
        for kernel, matrix, bias, self._part in places:
            kernel(x, matrix, bias)
        self._part = None
        return y

    def _gemm(
        self,
        code: str,
        x: Value,
        weight: Any,
        bias_O: Tensor | None,
        scratch_bytes: int,
        **numbers: int,
    ) -> Value:
        assert x.dense and x.width == weight.inputs
        y = self._part or self._new(weight.outputs, like=x)
        numbers |= {"width": weight.inputs, "count": weight.outputs, "bias": address(bias_O)}
        self._write(code, x=x, y=y, weight=address(weight.panels), **numbers)
        self._scratch_bytes = max(self._scratch_bytes, scratch_bytes)
        return y

    def rope(self, x: Value, cos_PR: Tensor, sin_PR: Tensor) -> Value:
        """Rotate in place: no other operation reads queries and keys before the rope."""
        angles = {"weight": address(cos_PR), "bias": address(sin_PR), "pairs": cos_PR.shape[-1]}
        self._write("rope", x=x, y=x, width=x.width // x.heads, count=x.heads, **angles)
        return x

    def gated(self, x: Value, activation: int) -> Value:
        assert x.dense
        y = self._new(x.width // 2)
        self._write("gated", x=x, y=y, width=y.width, activation=activation)
        return y

    def add(self, x: Value, other: Value | None, factor: float) -> Value:
        """Return x · factor + other."""
        assert x.dense and (other is None or (other.dense and other.dtype == x.dtype))
        y = self._new(x.width, like=x)
        self._write("add", x=x, second=other, y=y, width=x.width, factor=factor)
        return y

    def widen(self, x: Value) -> Value:
        """Return the value in fp32."""
        if not x.dense:
            raise NotLoweredError("some columns in fp32")
        y = self._new(x.width)
        self.dtypes[y.buffer] = torch.float32
        self._write("widen", x=x, y=y, width=x.width)
        return y

    def over_ranks(self, x: Value, work: Callable[[Tensor], Tensor]) -> Value:
        """Call `work` from Python on the rows of `x`, between two native calls."""
        assert x.dense
        y = self._new(x.width)
        self._write(PAUSE, x=x, y=y, width=x.width, work=lambda own_TH, batch: work(own_TH))
        return y

    def attend_over_ranks(
        self,
        q: Value,
        k: Value,
        v: Value,
        layer: Any,
        batch: None,
        work: Callable[[Tensor, Any], Tensor],
    ) -> Value:
        """Attend over ranks that hold parts of the context, between two native calls."""
        y, heads = self._new(q.width, q.heads), q.heads
        self._write("write_kv", x=k, second=v, kv_group=layer.group, kv=layer.numbers)

        def attend(own_TH: Tensor, batch: Any) -> Tensor:
            return work(own_TH.unflatten(1, (heads, -1)), batch).flatten(1)

        self._write(PAUSE, x=q, y=y, width=q.width, work=attend)
        return y

    def attend(
        self, q: Value, k: Value | None, v: Value | None, layer: Any, batch: None, rule: Any
    ) -> Value:
        y, memory = self._new(q.width, q.heads), {"kv_group": layer.group, "kv": layer.numbers}
        exact = getattr(layer, "open", None)
        if exact is not None:
            memory |= {"open_group": exact.group, "open": exact.numbers}
        if k is not None and exact is not None:
            self._write("write_kv", x=k, second=v, kv_group=exact.group, kv=exact.numbers)
            self._write("round_kv", **memory)
        elif k is not None:
            self._write("write_kv", x=k, second=v, **memory)
        sight = {"window": rule.window, "sinks": rule.sinks}
        numbers = {**sight, "factor": rule.scale, "shift": rule.softcap}
        numbers["bias"] = address(rule.sink_logits)
        self._write("attention", x=q, y=y, count=q.heads, **numbers, **memory)
        return y

    def program(self, library: NativeLibrary, result: Value) -> Program:
        """Return the program of the recorded operations, with shared buffers."""
        operations = fuse_gates(self._operations, result)
        row_bytes = [
            width * self.dtypes.get(buffer, self.dtype).itemsize
            for buffer, width in enumerate(self.widths)
        ]
        slots, row_bytes = share_buffers(operations, row_bytes, result.buffer, self.given)
        pauses, native_operations = list[Pause](), list[dict[str, Any]]()
        for operation in operations:
            if operation["code"] != PAUSE:
                native_operations.append(operation)
                continue
            x, y = operation["x"], slots[operation["y"].buffer]
            columns = slots[x.buffer], x.first, self.widths[x.buffer]
            pauses.append(
                Pause(len(native_operations), *columns, y, operation["width"], operation["work"])
            )
        operations = native_operations
        records = np.zeros(len(operations), OPERATION)
        for record, operation in zip(records, operations, strict=True):
            record["type"] = TYPES[getattr(operation.get("x"), "dtype", self.dtype)]
            record["scratch"] = len(row_bytes)
            record["code"] = CODES.index(operation["code"])
            for name in ("x", "y", "second"):
                value = operation.get(name)
                record[name] = (
                    (slots[value.buffer], value.first, self.widths[value.buffer])
                    if value is not None
                    else NOWHERE
                )
            for name in set(operation) - {"code", "x", "y", "second"}:
                record[name] = operation[name]
        row_bytes.append(self._scratch_bytes)
        given = None
        if self.given is not None:
            given = slots[self.given]
            row_bytes[given] = 0
        place = slots[result.buffer], self.widths[result.buffer]
        types = self.dtype, result.dtype
        return Program(library, records, row_bytes, *place, *types, given, pauses)


def buffers_of(operation: dict[str, Any]) -> list[int]:
    """Return the buffers that an operation reads and writes."""
    return [operation[name].buffer for name in ("x", "second", "y") if operation.get(name)]


def fuse_gates(operations: list[dict[str, Any]], result: Value) -> list[dict[str, Any]]:
    """Fuse each gate into the GEMM before it, where no other operation reads its outputs.

    linear 1 → 2 · gated 2 → 3    becomes    linear 1 → 2, gated to 3
    """
    users = Counter(buffer for operation in operations for buffer in set(buffers_of(operation)))
    users[result.buffer] += 1
    merged: list[dict[str, Any]] = []
    for operation in operations:
        before = merged[-1] if merged else None
        if (
            before is not None
            and operation["code"] == "gated"
            and before["code"] in GEMMS
            and before["y"].buffer == operation["x"].buffer
            and users[operation["x"].buffer] == 2
        ):
            gate = {"second": operation["y"], "activation": operation["activation"]}
            merged[-1] = before | gate
        else:
            merged.append(operation)
    return merged


def share_buffers(
    operations: list[dict[str, Any]], widths: list[int], result: int, given: int | None = None
) -> tuple[dict[int, int], list[int]]:
    """Return (the slot of each buffer, the width of each slot), in the unit of `widths`.

    A slot is free again after the last operation with its buffer, but for that of the result. The
    caller's buffer `given` has a slot of its own. A sum may overwrite a summand. x + norm(x):
    buffer 0 is x, 1 its norm, 2 the sum; they have the slots 0, 1 and 0.
    """
    places = [buffers_of(operation) for operation in operations]
    last = {buffer: index for index, buffers in enumerate(places) for buffer in buffers}
    slots, sizes = dict[int, int](), list[int]()
    last[result] = len(operations)
    if given is not None:
        last[given], slots[given], sizes = len(operations), 0, [widths[given]]
    free: list[int] = []
    for index, (operation, buffers) in enumerate(zip(operations, places, strict=True)):
        ended = [buffer for buffer in dict.fromkeys(buffers) if last[buffer] == index]
        if operation["code"] == "add":
            free += [slots[buffer] for buffer in ended if buffer in slots]
            ended = [buffer for buffer in ended if buffer not in slots]
        for buffer in buffers:
            if buffer not in slots:
                width = widths[buffer]
                slot = min(free, key=lambda one: abs(sizes[one] - width), default=len(sizes))
                if slot == len(sizes):
                    sizes.append(width)
                else:
                    free.remove(slot)
                slots[buffer], sizes[slot] = slot, max(sizes[slot], width)
        free += [slots[buffer] for buffer in ended]
    return slots, sizes


def lower(
    forward: Callable[..., Any],
    library: NativeLibrary,
    dtype: torch.dtype,
    given: int = 0,
    *,
    embeds: bool = False,
) -> tuple[Program | None, str]:
    """Return (the program of `forward` or None, the reason).

    `forward` reads token ids, or with `given` rows of that width, or with `embeds` both.
    """
    recorder = OperationRecorder(dtype)
    arguments = [Value(recorder, -1, 0)] if embeds or not given else []
    arguments += [recorder.give(given)] if given else []
    try:
        result = forward(*arguments)
    except NotLoweredError as error:
        return None, f"each operation called from Python: a program has no {error}"
    program = recorder.program(library, result)
    calls = f"{program.num_calls} calls" if program.num_calls > 1 else "one call"
    return program, f"{len(program.operations)} operations in {calls}"
