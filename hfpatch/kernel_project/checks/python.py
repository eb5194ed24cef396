"""The Python package: 3.9's syntax, relative imports, prefixed registrations, pure layers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hfpatch.kernel_project.checks.row import Row, verdict
from hfpatch.kernel_project.project import Project, assigned_names

_WHERE = "project"
#: What comes with torch, or is generated.
_WITH_TORCH = {"torch", "triton"}
#: The modules of `python-depends` (kernels' python_depends.json).
_DEPENDS = {
    "einops": "einops",
    "helion": "helion",
    "tvm-ffi": "tvm_ffi",
    "nvidia-cutlass-dsl": "cutlass",
    "nki": "nki",
}
_REGISTRATIONS = {
    "custom_op",
    "define",
    "impl",
    "register_autograd",
    "register_autocast",
    "register_fake",
    "register_kernel",
    "register_torch_dispatch",
    "register_vmap",
    "triton_op",
}
#: Class variables that a layer may have.
_ALLOWED = {"has_backward", "can_torch_compile"}

#: Yields lines and what is wrong there.
_Check = Callable[[ast.Module], Iterator[tuple[int, str]]]


def rows(project: Project) -> Iterator[Row]:
    """The package's rows."""
    trees: dict[Path, ast.Module] = {}
    broken = []
    for path in sorted(project.package.rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8")
            trees[path] = ast.parse(text, feature_version=(3, 9))
        except SyntaxError as e:
            broken.append(f"`{path.relative_to(project.package)}:{e.lineno}`: {e.msg}")
        except (OSError, ValueError) as e:
            broken.append(f"`{path.relative_to(project.package)}`: {e}")

    def each(check: _Check) -> Iterator[str]:
        for path, tree in trees.items():
            for line, text in check(tree):
                yield f"`{path.relative_to(project.package)}:{line}`: {text}"

    broken += each(_new_annotations)
    yield verdict(
        _WHERE, "Python 3.9 can read it", broken, "write it for Python 3.9", f"{len(trees)} files"
    )
    depends = [*project.toml["general"].get("python-depends", [])]
    for backend in project.toml["general"].get("backends", []):
        depends += project.toml["general"].get(backend, {}).get("python-depends", [])
    allowed = {*sys.stdlib_module_names, *_WITH_TORCH, *(_DEPENDS.get(d, d) for d in depends)}
    yield verdict(
        _WHERE,
        "imports are relative, or torch's",
        each(lambda tree: _foreign_imports(tree, allowed, project.package.name)),
        "`from . import x` within the package; from elsewhere only torch, the standard library and "
        "`python-depends`",
    )
    yield verdict(
        _WHERE,
        "operators are registered under their namespace",
        each(_unprefixed),
        '`add_op_namespace_prefix("name")`, of the generated `_ops`',
    )
    yield from _exports(project, trees)


def _new_annotations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`X | Y` in annotations that Python 3.9 would evaluate."""
    if any(
        isinstance(n, ast.ImportFrom)
        and n.module == "__future__"
        and any(a.name == "annotations" for a in n.names)
        for n in tree.body
    ):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            spec = node.args
            every = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
            found = [a.annotation for a in every if a is not None] + [node.returns]
        elif isinstance(node, ast.AnnAssign):
            found = [node.annotation]
        else:
            continue
        for annotation in found:
            if annotation is not None and any(
                isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitOr)
                for n in ast.walk(annotation)
            ):
                yield annotation.lineno, f"`{ast.unparse(annotation)}` (Optional or Union)"


def _foreign_imports(
    tree: ast.Module, allowed: set[str], package: str
) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if top == package or top not in allowed:
                yield node.lineno, f"`{ast.unparse(node)}`"


def _unprefixed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in _REGISTRATIONS or "library" not in ast.unparse(node.func.value):
            continue
        if node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
            yield node.lineno, f"`{node.func.attr}({ast.unparse(node.args[0])})`"


# ------------------------------------------------------------------------------ exports, layers


def _exports(project: Project, trees: dict[Path, ast.Module]) -> Iterator[Row]:
    main = trees.get(project.package / "__init__.py")
    if main is None:
        return
    names = assigned_names(main)
    yield verdict(
        _WHERE,
        "`__all__` says what is public",
        [] if names else ["`__init__.py` has no `__all__` that is a list of names"],
        "list every function that users may rely on",
        note=f"{len(names)} names",
    )
    module = project.package / "layers.py"
    module = module if module in trees else project.package / "layers" / "__init__.py"
    if module not in trees:
        return
    yield verdict(
        _WHERE,
        "layers are exported",
        [] if "layers" in names else ["`__init__.py`: `layers` is not in `__all__`"],
        '`from . import layers`, and "layers" in `__all__`',
    )
    yield verdict(
        _WHERE,
        "layers are pure",
        (
            f"`{node.name}` {why}"
            for node in trees[module].body
            if isinstance(node, ast.ClassDef) and _is_layer(node)
            for why in _impurities(node)
        ),
        "a layer has a `forward` and nothing else; what it reads of its adopter is annotated "
        "(`weight: torch.Tensor`)",
        note=", ".join(
            n.name for n in trees[module].body if isinstance(n, ast.ClassDef) and _is_layer(n)
        ),
    )


def _is_layer(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split(".")[-1] == "Module" for base in node.bases)


def _impurities(node: ast.ClassDef) -> Iterator[str]:
    methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if "forward" not in methods:
        yield "has no `forward`"
    for name in methods:
        if name != "forward":
            yield f"has a method `{name}`"
    for child in node.body:
        targets: list[ast.expr] = []
        if isinstance(child, ast.Assign):
            targets = list(child.targets)
        elif isinstance(child, ast.AnnAssign) and child.value is not None:
            targets = [child.target]
        for target in targets:
            if not (isinstance(target, ast.Name) and target.id in _ALLOWED):
                yield f"has a class variable `{ast.unparse(target)}`"
