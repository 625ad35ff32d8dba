"""What the package's source uses of Megatron, of torch's internals and of kernel
packages.

Read from the syntax trees, scope by scope: imports in each of their forms,
``importlib``'s with a literal name, names that are bound to what those gave, attributes
of these, ``getattr`` and ``hasattr`` with a literal, and what classes that inherit from
Megatron's take of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Packages whose names are looked for; of torch those with an underscore alone.
FOREIGN = "megatron transformer_engine apex quack emerging_optimizers torch".split()
# Names that this code base gives to objects of Megatron's in its rooms that deal with
# them, and what they are.
_BUILT = dict(
    line.split()
    for line in """
        dist_opt DistributedOptimizer
        part DistributedOptimizer
        buffer _ParamAndGradBuffer
        bucket _ParamAndGradBucket
        chunk DistributedDataParallel
        optimizer ChainedOptimizer
        optimizer_config OptimizerConfig
        model_config TransformerConfig
        ddp_config DistributedDataParallelConfig
        ddp DistributedDataParallelConfig
        pg_collection ProcessGroupCollection
        param parameter
    """.strip().splitlines()
)
_LAYOUT = {"layout": "PerBufferParamLayout"}
_ARGUMENTS = {"args": "arguments", "given": "arguments"}
OBJECTS = {
    "mcore": _BUILT | _LAYOUT,
    "lab/bench/step": _BUILT,
    "lab/dry_run": _BUILT,
    "megatron_lm": _ARGUMENTS,
}
Bindings = dict[str, str]


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """A symbol that a file names."""

    symbol: str  # dotted, from the package on; of an object ``CLASS:attribute``
    file: str  # of this package, from its folder on
    line: int  # in it
    # by ``getattr`` with a default or ``hasattr``: the file does without it
    defaulted: bool = False

    def __str__(self) -> str:
        return f"{self.symbol} ({self.file}:{self.line})"


def uses_in(folder: Path) -> list[Use]:
    """Of all files in a folder and below it."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    bases = _inheriting(trees.values())
    uses: set[Use] = set()
    for path, tree in trees.items():
        uses |= _read(tree, path.relative_to(folder).as_posix(), bases)
    return sorted(uses)


def uses_in_text(text: str, file: str) -> list[Use]:
    """Of one file's text, in which ``file`` is its path from the package's folder
    on.
    """
    tree = ast.parse(text)
    return sorted(_read(tree, file, _inheriting([tree])))


def _read(tree: ast.Module, file: str, bases: Mapping[str, str]) -> set[Use]:
    reader = _Reader(file, bases)
    reader.read(tree)
    return reader.uses


def own_names(folder: Path) -> set[str]:
    """Attributes that files of a folder set on whatever object, and methods that they
    define.
    """
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.ClassDef):
                assigned = (each for each in node.body if isinstance(each, ast.Assign))
                names |= {
                    t.id for a in assigned for t in a.targets if isinstance(t, ast.Name)
                }
    return names


def _inheriting(trees: Collection[ast.Module]) -> dict[str, str]:
    """Classes of this package's, by name, that inherit from one of Megatron's, and from
    which.
    """
    bases: dict[str, str] = {}
    for _ in range(4):  # as deep as they inherit from each other
        for tree in trees:
            known = _imported(tree.body, {})
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    for base in node.bases:
                        name = ast.unparse(base)
                        if known.get(name, "").startswith("megatron."):
                            bases[node.name] = known[name]
                        elif name in bases:
                            bases[node.name] = bases[name]
    return bases


def _is_foreign(name: str) -> bool:
    return name.split(".")[0] in FOREIGN


def _imported(body: list[ast.stmt], outer: Bindings) -> Bindings:
    """Names that imports bind in a scope, functions and classes inside it left out."""
    bound = dict(outer)
    for node in _own(body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_foreign(alias.name):
                    root = alias.name.split(".")[0]
                    bound[alias.asname or root] = alias.name if alias.asname else root
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and _is_foreign(node.module)
        ):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


_SETTERS = ("set", "add", "set_existing")  # of ``runtime.patches``
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Nodes of a scope, in order, not of the scopes inside it but with those
    themselves.
    """
    waiting: list[ast.AST] = list(reversed(body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))
        elif not isinstance(node, ast.Lambda):
            waiting.extend(node.decorator_list)


class _Reader:
    def __init__(self, file: str, bases: Mapping[str, str]) -> None:
        self.file = file
        self.uses: set[Use] = set()
        self._bases = bases
        room = next((room for room in OBJECTS if file.startswith(f"{room}/")), "")
        self._objects = OBJECTS.get(room, {})
        self._returns: Bindings = {}

    def read(self, tree: ast.Module) -> None:
        """Take up the uses of a file."""
        top = _imported(tree.body, {})
        for node in tree.body:  # functions that return a module of Megatron's
            if isinstance(node, ast.FunctionDef) and isinstance(
                node.body[-1], ast.Return
            ):
                bound = _imported(node.body, top)
                value = node.body[-1].value
                target = self._resolved(value, bound) if value is not None else None
                if target is not None:
                    self._returns[node.name] = target
        self._scope(tree.body, {}, None)

    def _scope(self, body: list[ast.stmt], outer: Bindings, owner: str | None) -> None:
        bound = _imported(body, outer)
        nodes = list(_own(body))
        for _ in range(2):
            for node in nodes:
                self._bind(node, bound)
        inner: set[int] = set()
        for node in nodes:
            self._take(node, bound, owner, inner)
            if isinstance(node, ast.ClassDef):
                of = self._bases.get(node.name)
                if of is not None:
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef):
                            self._use(f"{of}:{method.name}", method)
                self._scope(node.body, bound, of)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for default in [*node.args.defaults, *node.args.kw_defaults]:
                    if default is not None:
                        self._scope([ast.Expr(default)], bound, owner)
                own = {
                    name: to
                    for name, to in bound.items()
                    if name not in _parameters(node)
                }
                self._scope(node.body, own, owner)
            elif isinstance(node, ast.Lambda):
                self._scope([ast.Expr(node.body)], bound, owner)

    def _bind(self, node: ast.AST, bound: Bindings) -> None:
        pairs: list[tuple[ast.AST, ast.AST]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif (
            isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None
        ):
            pairs = [(node.target, node.value)]
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                both = list(zip(target.elts, value.elts, strict=False))
            else:
                both = [(target, value)]
            for one, its in both:
                to = self._resolved(its, bound)
                if (
                    isinstance(one, ast.Name)
                    and to is not None
                    and not to.endswith(")")
                ):
                    bound[one.id] = to

    def _resolved(self, node: ast.AST, bound: Bindings) -> str | None:
        """The dotted name of a module, class or function that an expression is."""
        if isinstance(node, ast.Name):
            return bound.get(node.id)
        if isinstance(node, ast.Attribute):
            of = self._resolved(node.value, bound)
            return f"{of}.{node.attr}" if of is not None else None
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in self._returns:
                return self._returns[function]
            if function == "importlib.import_module" and node.args:
                name = _text(node.args[0])
                return name if name is not None and _is_foreign(name) else None
            if function == "getattr" and len(node.args) > 1:
                of = self._resolved(node.args[0], bound)
                name = _text(node.args[1])
                return f"{of}.{name}" if of is not None and name is not None else None
        return None

    def _take(
        self, node: ast.AST, bound: Bindings, owner: str | None, inner: set[int]
    ) -> None:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and _is_foreign(node.module)
        ):
            for alias in node.names:
                self._use(f"{node.module}.{alias.name}", node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_foreign(alias.name):
                    self._use(alias.name, node)
        elif isinstance(node, ast.Constant) and _is_module(node.value):
            self._use(str(node.value), node)
        elif isinstance(node, ast.Attribute):
            self._attribute(node, node.value, node.attr, bound, owner, inner)
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
                name = _text(node.args[1])
                default = function == "hasattr" or len(node.args) > 2
                if name is not None:
                    self._attribute(
                        node, node.args[0], name, bound, owner, inner, default
                    )
            elif function.split(".")[-1] in _SETTERS and len(node.args) > 1:
                name = _text(node.args[1])
                of = self._resolved(node.args[0], bound)
                if name is not None and of is not None:
                    self._use(f"{of}.{name}", node, function.endswith("_existing"))
            elif function.endswith(".wrap") and len(node.args) > 2:
                module, symbol = map(_text, node.args[:2])
                if module is not None and symbol is not None and _is_foreign(module):
                    self._use(f"{module}.{symbol}", node)
            elif function.split(".")[-1] in ("replaced", "set_all") and node.args:
                of = self._resolved(node.args[0], bound)
                for keyword in node.keywords:
                    if of is not None and keyword.arg is not None:
                        self._use(f"{of}.{keyword.arg}", node)
            elif function == "importlib.import_module":
                name = _text(node.args[0])
                if name is not None and _is_foreign(name):
                    self._use(name, node)

    def _attribute(
        self,
        node: ast.AST,
        value: ast.AST,
        name: str,
        bound: Bindings,
        owner: str | None,
        inner: set[int],
        defaulted: bool = False,
    ) -> None:
        if id(node) in inner:
            return
        of = self._resolved(value, bound)
        text = ast.unparse(value).split(".")[-1]
        if of is not None:
            self._use(f"{of}.{name}", node, defaulted)
            inner.add(id(value))
        elif owner is not None and text in ("self", "super()"):
            self._use(f"{owner}:{name}", node, defaulted)
        elif text in self._objects:
            self._use(f"{self._objects[text]}:{name}", node, defaulted)

    def _use(self, symbol: str, node: ast.AST, defaulted: bool = False) -> None:
        if symbol.startswith("torch") and not any(
            part.startswith("_") and not part.startswith("__")
            for part in symbol.split(".")
        ):
            return
        self.uses.add(Use(symbol, self.file, getattr(node, "lineno", 0), defaulted))


def _is_module(value: object) -> bool:
    return (
        isinstance(value, str) and re.fullmatch(r"megatron(\.\w+)+", value) is not None
    )


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return {each.arg for each in every}


def _text(node: ast.AST) -> str | None:
    """A literal, or one with gaps as ``megatron.training.{}``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return None
