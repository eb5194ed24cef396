"""Whether a block is, at a call, what it was when its calls were captured."""

from __future__ import annotations

import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn, strided

from hfpatch.direct_calls import DIRECT, has_own_call
from hfpatch.proof.keys import names_read
from hfpatch.proof.library import called_by_forward, functions_of, is_installed, reached
from hfpatch.proof.subject import class_of, coded
from hfpatch.proof.surroundings import functions_of_torch
from hfpatch.proof.unchanged import (
    CONTAINERS,
    INCOMPARABLE,
    ProcessorPart,
    calls_otherwise,
    has_diffusers_hook,
    is_bound,
    settings_of,
)
from hfpatch.regions.listening import is_idle

_PLAIN = (int, float, bool, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def guard(
    block: nn.Module,
    read: Sequence[str],
    called: Sequence[str],
    numbers: Sequence[tuple[str, str]],
    *,
    training: bool = False,
) -> Callable[[nn.Module], bool]:
    """A function that tells whether the modules that a forward of ours stands in for are those of
    now, in evaluation mode: classes, settings, what their code names of their configuration,
    processors, shapes and dtypes of their tensors, and nobody's hooks or forwards. It holds no
    module: the blocks of a list share it.

    It is written as straight-line code, since it runs at each call of each block.

    Args:
        read: paths of those modules.
        called: paths of the modules that it calls. Code may ask for the dtype of their weights, and
            kernels take what they return: a layer of somebody's own class must be the proof's.
        numbers: attributes that number a block; they may differ.
        training: the forward runs in any mode, and looks at tensors and at the attention that is
            chosen by itself.
    """
    modules = {path: inside(block, path) for path in read}
    scope: dict[str, Any] = {
        "class_of": class_of, "is_ours": is_bound, "has_hook": has_diffusers_hook,
        "is_idle": is_idle, "otherwise": calls_otherwise,
        "has_own_call": has_own_call, "own_code": has_own_code,
        "incomparable": INCOMPARABLE, "plain": (Tensor, nn.Parameter),
        "strided": strided,
    }  # fmt: skip
    lines: list[str] = []
    order = sorted(modules, key=lambda p: (p.count(".") + bool(p), p))
    place = {path: i for i, path in enumerate(order)}
    configs = _configs(modules, order, with_attention=not training)
    for i, path in enumerate(order):
        module = modules[path]
        above, _, name = path.rpartition(".")
        if path:
            holder = _holder(above, place, lines, scope)
            lines.append(f"m{i} = {holder}['_modules'][{name!r}]")
            lines.append(f"d{i} = m{i}.__dict__")
        else:
            lines += [f"m{i} = root", f"d{i} = root.__dict__"]
        lines += _checks(i, path, module, numbers, scope)
        if not training:
            lines.append(f"if d{i}['training']: return False")
            lines += _tensors(i, module, scope)
        if path in configs:
            scope[f"names{i}"], scope[f"values{i}"] = configs[path]
            lines.append(f"if names{i}(d{i}['config'].__dict__) != values{i}: return False")
        if "processor" in module.__dict__:
            scope[f"processor{i}"] = ProcessorPart(module.__dict__["processor"], ()).is_proven
            lines.append(f"if not processor{i}(d{i}.get('processor')): return False")
    lines += _shared(modules, order, place)
    lines += _functions(modules, scope)
    for j, path in enumerate(called):
        layer = inside(block, path)
        weight = layer._parameters.get("weight")
        if not path:
            continue
        above, _, name = path.rpartition(".")
        lines.append(f"w = {_holder(above, place, lines, scope)}['_modules'][{name!r}]")
        cls = _class(scope, f"w{j}", type(layer))
        lines.append(f"if type(w) is not {cls} and own_code(type(w)): return False")
        if weight is not None:
            dtype = _named(scope, weight.dtype)
            # none of its own: an adapter's, or a quantizer's
            lines.append("t = w.__dict__['_parameters'].get('weight')")
            lines.append(f"if t is not None and t.dtype is not {dtype}: return False")
    table = attention_table()
    chosen = () if training else chosen_attention(modules.values(), table)
    for j, (name, function) in enumerate(chosen):
        scope["table"], scope[f"function{j}"] = table, function
        lines.append(f"if table.get({name!r}) is not function{j}: return False")
    text = "def holds(root):\n    try:\n"
    text += "".join(f"        {line}\n" for line in lines)
    text += "    except (AttributeError, *incomparable):\n        return False\n    return True\n"
    exec(compile(text, "<hfpatch guard>", "exec"), scope)
    return scope["holds"]  # type: ignore[no-any-return]


def _class(scope: dict[str, Any], name: str, cls: type) -> str:
    """What stands for a class in the lines. One that no module names is not kept alive: that of a
    parametrized layer holds the layer."""
    home = getattr(sys.modules.get(cls.__module__), "__dict__", {})
    if home.get(cls.__qualname__) is cls:
        scope[name] = cls
        return name
    scope[name] = weakref.ref(cls)
    return f"{name}()"


def has_own_code(cls: type) -> bool:
    """Whether a class's forward, or one that it may call, is no installed package's."""
    return any(not is_installed(vars(base).get("forward")) for base in cls.__mro__[:-1])


def _holder(above: str, place: dict[str, int], lines: list[str], scope: dict[str, Any]) -> str:
    """The variable with the `__dict__` of the module above."""
    if above in place:
        return f"d{place[above]}"
    further, _, name = above.rpartition(".")
    return f"{_holder(further, place, lines, scope)}['_modules'][{name!r}].__dict__"


def _checks(
    i: int, path: str, module: nn.Module, numbers: Sequence[tuple[str, str]], scope: dict[str, Any]
) -> Iterator[str]:
    cls = class_of(module) if path == "" else type(module)
    same = _class(scope, f"c{i}", cls)
    if path == "":  # hooks on the block itself fire, and FSDP2 puts a class before it
        yield f"if type(m{i}) is not {same} and class_of(m{i}) is not {same}: return False"
    else:
        scope[f"f{i}"] = cls.forward
        hooks = " or ".join(f"d{i}[{h!r}]" for h in _HOOKS)
        yield f"if type(m{i}) is not {same} or {same}.forward is not f{i}: return False"
        scope[f"o{i}"] = own = coded(cls.forward)
        scope[f"k{i}"] = own.__code__
        yield f"if o{i}.__code__ is not k{i} or otherwise({same}): return False"
        called = f"'_call_impl' in d{i} or ({DIRECT!r} in d{i} and has_own_call(d{i}))"
        yield f"if {called}: return False"
        yield f"if ({hooks}) and not is_idle(m{i}): return False"
        yield f"if 'forward' in d{i} and not is_ours(m{i}, d{i}['forward']): return False"
        yield f"if '_hf_hook' in d{i}: return False"
        yield f"if '_diffusers_hook' in d{i} and has_hook(d{i}): return False"
    names = (*module._modules, *module._parameters, *module._buffers)
    if names:
        scope[f"n{i}"] = frozenset(names)  # an attribute of that name would hide it
        yield f"if not d{i}.keys().isdisjoint(n{i}): return False"
    if isinstance(module, CONTAINERS):
        scope[f"l{i}"] = tuple(module._modules)
        yield f"if tuple(d{i}['_modules']) != l{i}: return False"
    ignore = {name for where, name in numbers if where == path}
    reads, settings = settings_of(module, ignore)
    if settings is not None:
        scope[f"r{i}"], scope[f"s{i}"] = reads, settings
        yield f"if r{i}(d{i}) != s{i}: return False"


def _tensors(i: int, module: nn.Module, scope: dict[str, Any]) -> Iterator[str]:
    for kind in ("_parameters", "_buffers"):
        for name, t in module.__dict__[kind].items():
            yield f"t = d{i}[{kind!r}].get({name!r})"
            if t is None:
                yield "if t is not None: return False"
            else:
                dtype, shape = _named(scope, t.dtype), _named(scope, t.shape)
                # a subclass has operators of its own, of which a kernel asks for none
                yield "if type(t) not in plain: return False"
                yield f"if t.dtype is not {dtype} or t.shape != {shape}: return False"
                # its memory holds other values, or none that a kernel knows (`is_dense`)
                yield "if t.layout is not strided or t.is_neg() or t.is_nested: return False"


def _named(scope: dict[str, Any], value: Any) -> str:
    """The name of a constant."""
    for name, held in scope.items():
        if name.startswith("x") and type(held) is type(value) and held == value:
            return name
    scope[name := f"x{len(scope)}"] = value
    return name


def _functions(modules: dict[str, nn.Module], scope: dict[str, Any]) -> Iterator[str]:
    """That what the code finds by name, a processor's too, and what that finds in turn, is what it
    was."""
    kinds = {class_of(m): m for m in modules.values()}
    code = [
        called_by_forward(m)
        for cls, m in kinds.items()
        if cls.__module__.startswith(("diffusers", "transformers"))
    ]
    for cls in {type(m.__dict__.get("processor")): None for m in modules.values()}:
        members = [v for base in cls.__mro__[:-1] for v in vars(base).values()]
        code.append([f for v in members for f in functions_of(v)])
    found = {
        (id(held), name): (held, function)
        for functions in code
        for held, name, function in reached(functions)
    }
    for j, ((_, name), (held, function)) in enumerate(found.items()):
        scope[f"g{j}"], scope[f"h{j}"], scope[f"b{j}"] = held, function, function.__code__
        yield f"if g{j}.get({name!r}) is not h{j} or h{j}.__code__ is not b{j}: return False"


def _shared(
    modules: dict[str, nn.Module], order: Sequence[str], place: dict[str, int]
) -> Iterator[str]:
    """That modules which held one configuration still do."""
    first: dict[int, int] = {}
    for path in order:
        config = modules[path].__dict__.get("config")
        if config is None:
            continue
        i, j = place[path], first.setdefault(id(config), place[path])
        if i != j:
            yield f"if d{i}['config'] is not d{j}['config']: return False"


def inside(block: nn.Module, path: str) -> nn.Module:
    """The module at `path`, whatever attribute hides it."""
    found = block
    for name in filter(None, path.split(".")):
        found = found._modules[name]  # type: ignore[assignment]
    return found


def hides(module: nn.Module) -> bool:
    """Whether an attribute of a module stands before one of its tensors or children."""
    held = (module._modules, module._parameters, module._buffers)
    names = [n for of in held for n, _ in of.items()]  # a scripted module's are no dicts
    return not module.__dict__.keys().isdisjoint(names)


def _configs(
    modules: dict[str, nn.Module], order: Sequence[str], *, with_attention: bool
) -> dict[str, tuple[Any, Any]]:
    """Of the first module that holds each configuration: what reads the settings that the code of
    all its holders names, and what that gave."""
    named: dict[int, set[str]] = {}
    first: dict[int, str] = {}
    for path in order:
        config = modules[path].__dict__.get("config")
        if config is not None and hasattr(config, "__dict__"):
            first.setdefault(id(config), path)
            named.setdefault(id(config), set()).update(names_read(modules[path]))
    found: dict[str, tuple[Any, Any]] = {}
    for key, path in first.items():
        held = modules[path].__dict__["config"].__dict__
        named[key] |= {f"_{n}" for n in named[key]}  # behind a property
        attention = {"_attn_implementation", "_attn_implementation_internal"}
        named[key] = named[key] | attention if with_attention else named[key] - attention
        names = sorted(n for n in named[key] if n in held and isinstance(held[n], _PLAIN))
        if names:
            read = operator.itemgetter(*names)
            found[path] = (read, read(held))
    return found


def attention_table() -> Any:
    """transformers' table of attention functions, empty where it is not loaded."""
    utils = sys.modules.get("transformers.modeling_utils")
    return getattr(utils, "ALL_ATTENTION_FUNCTIONS", {})


def chosen_attention(modules: Iterable[nn.Module], table: Any) -> Iterator[tuple[str, Any]]:
    """What the table has for the attention that the configurations of modules name."""
    configs = {id(c): c for m in modules if (c := m.__dict__.get("config")) is not None}
    names = {getattr(c, "_attn_implementation", None) for c in configs.values()}
    yield from ((n, table.get(n)) for n in sorted(n for n in names if isinstance(n, str)))


def functions_around(block: nn.Module) -> tuple[Any, ...]:
    """A key: the functions of PyTorch that a block's code names, its attention's too."""
    modules = list(block.modules())
    attention = [f for _, f in chosen_attention(modules, attention_table())]
    return functions_of_torch(modules, [f for f in attention if isinstance(f, types.FunctionType)])
