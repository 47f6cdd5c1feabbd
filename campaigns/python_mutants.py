"""Python with one operator changed: every change of one line that a module offers."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path

from campaigns.shader_mutants import Mutant

_OPERATORS: dict[type[ast.AST], tuple[str, ...]] = {  # what stands there, then what may instead
    ast.Lt: ("<", "<=", ">"), ast.LtE: ("<=", "<"), ast.Gt: (">", ">=", "<"), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.Mod: ("%", "//"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Arguments and calls that no outcome depends on.
_COSMETIC = {"strict", "show_default", "frozen", "slots", "repr", "indent", "stacklevel", "maxsize"}
_HARMLESS = {"cache_clear", "collect", "close", "malloc_trim"}


class _Changes(ast.NodeVisitor):
    """Every change of one line that a module offers; none of texts, annotations or messages."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.lines, self.data = path, text.split("\n"), text.encode()
        self.mutants: list[Mutant] = []
        self._begins = [0]
        for line in self.lines:
            self._begins.append(self._begins[-1] + len(line.encode()) + 1)
        self._loop: ast.AST | None = None
        self._in_function = False
        self.visit(ast.parse(text))

    def _begin(self, node: ast.AST) -> int:
        return self._begins[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self._begins[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        return self.data[self._begin(node) : self._end(node)].decode()

    def _offer(self, kind: str, begin: int, end: int, instead: str) -> None:
        if b"\n" in self.data[begin:end]:
            return
        line = self.data.count(b"\n", 0, begin)
        first, before = self._begins[line], self.lines[line]
        head = self.data[first:begin].decode()
        after = head + instead + self.data[end : self._begins[line + 1] - 1].decode()
        self.mutants.append(Mutant(kind, self.path, before, after, line))

    def _offer_operator(self, left: ast.AST, op: ast.AST, right: ast.AST, more: str = "") -> None:
        """Offers what may stand instead of the operator between two nodes."""
        sign, *others = _OPERATORS.get(type(op), ("",))
        begin, end = self._end(left), self._begin(right)
        at = self.data.find((sign + more).encode(), begin, end)
        if not others or at < 0 or b"#" in self.data[begin:end]:
            return
        for other in others:
            kind = f"{sign}{more} to {other}{more}"
            self._offer(kind, at, at + len(sign + more), other + more)

    def _offer_removal(self, kind: str, statement: ast.stmt) -> None:
        begin = self._begin(statement)
        if not self.data[self._begins[statement.lineno - 1] : begin].strip():
            self._offer(kind, begin, begin, "if 0: ")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for (left, right), op in zip(pairwise(operands), node.ops, strict=True):
            self._offer_operator(left, op, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self._offer_operator(left, node.op, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        of_types = isinstance(node.op, ast.BitOr) and not self._in_function
        if not of_types and not _is_literal(node):
            self._offer_operator(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _is_literal(node.value):
            self._offer_operator(node.target, node.op, node.value, "=")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._offer("not removed", self._begin(node), self._begin(node) + len("not "), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._offer(
                f"{value} to {not value}", self._begin(node), self._end(node), f"{not value}"
            )
        elif isinstance(value, int | float):
            other = value + 1 if isinstance(value, int) else value * 1.25 or 0.5
            self._offer("another constant", self._begin(node), self._end(node), repr(other))

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", "")
        if name in _OPPOSITES:
            other = _OPPOSITES[name]
            self._offer(f"{name} to {other}", self._begin(node.func), self._end(node.func), other)
        if name in ("isinstance", "issubclass"):  # and types
            self.visit(node.args[0])
        elif name != "lru_cache":
            self.generic_visit(node)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in filter(None, (node.lower, node.upper)):
            if not isinstance(bound, ast.Constant):
                instead = f"({self._text(bound)}) + 1"
                self._offer("bound off by one", self._begin(bound), self._end(bound), instead)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        test = ast.dump(node.test)
        if "'TYPE_CHECKING'" in test or "'__name__'" in test:
            return
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            begin = self._begin(node.test)
            self._offer("condition negated", begin, begin, "not ")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and getattr(node.value, "value", True) not in (None, False):
            self._offer("None returned", self._begin(node.value), self._end(node.value), "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") not in _HARMLESS:
            self._offer_removal("call removed", node)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._offer_removal("raise removed", node)  # what it says is a message

    def visit_Break(self, node: ast.Break) -> None:
        if not isinstance(self._loop, ast.While):  # which would not end
            self._offer("break to continue", self._begin(node), self._end(node), "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._offer("continue to break", self._begin(node), self._end(node), "break")

    def visit_For(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        outer, self._loop = self._loop, node
        self.generic_visit(node)
        self._loop = outer

    visit_AsyncFor = visit_While = visit_For

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._in_function = self._in_function, True
        for part in [*node.decorator_list, node.args, *node.body]:
            self.visit(part)
        self._in_function = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if getattr(node.targets[0], "id", "") != "__all__":
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _COSMETIC:
            self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        """Nothing but an annotation."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text; before Python 3.12 what is in it has no place either."""


def _is_literal(node: ast.AST) -> bool:
    """Whether a text or a collection is written there, to which another operator is an error."""
    if isinstance(node, ast.BinOp):
        return _is_literal(node.left) or _is_literal(node.right)
    kinds = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp)
    return isinstance(node, kinds) or isinstance(getattr(node, "value", None), str | bytes)


@cache
def _changes(root: Path, path: Path) -> list[Mutant]:
    name = path.relative_to(root).as_posix()
    return _Changes(name, path.read_text(encoding="utf-8")).mutants


def _is_another_program(root: Path, mutant: Mutant) -> bool:
    text = (root / mutant.path).read_text(encoding="utf-8")
    try:
        changed = ast.parse(mutant.source(mutant.path, text))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(text))


def of_a_module(rng: random.Random, root: Path, paths: Iterable[Path]) -> Mutant:
    """A change of a line of one of these; each kind alike, whatever its number of places."""
    offered = defaultdict(list)
    for path in sorted(paths):
        for mutant in _changes(root, path):
            offered[mutant.kind].append(mutant)
    while True:
        mutant = rng.choice(offered[rng.choice(sorted(offered))])
        if _is_another_program(root, mutant):
            return mutant
