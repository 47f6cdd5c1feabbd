"""Matrix units, which Slang does not know in GLSL: as functions, whose bodies become PTX in CUDA.

A cooperative matrix of 16 x 16 is eight registers of each of 32 invocations. In GLSL its operations
become calls of functions whose bodies only name what they read and write; Slang takes them over,
and then they get the instructions wmma.load, wmma.mma and wmma.store (PTX ISA, 9.7.14).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

_USES = {"A": "MatA", "B": "MatB", "Accumulator": "MatC"}
_ELEMENT_BYTES = {"uvec4": 16, "vec4": 16, "uvec2": 8, "vec2": 8, "uint": 4, "float": 4}
_MATRIX = r"coopmat<\w+, gl_ScopeSubgroup, 16u, 16u, gl_MatrixUse(\w+)>"
_LOAD = (
    r"coopMatLoad\((\w+), ([\w.]+), ([^;]*), ([^;,]*), "
    r"gl_CooperativeMatrixLayout(Row|Column)Major\)"
)
_STORE = (
    r"coopMatStore\((\w+(?: \* \(.*?\)\))?), ([\w.]+), ([^;]*), ([^;,]*), "
    r"gl_CooperativeMatrixLayoutRowMajor\)"
)
# What a constant of the kernel rules out, as SPIRV-Cross writes it.
_DEAD = re.compile(r"^( *)if \(false\)\n\1\{\n.*?^\1\}\n", re.DOTALL | re.MULTILINE)
_KIND, _NAME = r"(Mat[ABC]_\d+) m_", r"Mat[ABC]_\d+ (m_\d+);"
_TYPES = """
struct MatA { uint v[8]; };
struct MatB { uint v[8]; };
struct MatC { float v[8]; };
MatC filled(float x) { MatC m; for (int i = 0; i < 8; i++) m.v[i] = x; return m; }
MatC scaled(MatC a, MatC b) {
    MatC m; for (int i = 0; i < 8; i++) m.v[i] = a.v[i] * b.v[i]; return m;
}
"""
_SHUFFLE = "float shuffledXor(float x, uint mask) { return x + float(mask); }\n"


@dataclass(frozen=True)
class Access:
    """A load or a store of a matrix.

    Attributes:
        matrix: MatA, MatB or MatC.
        array: What is read or written, as GLSL calls it.
        layout: ``"row"`` or ``"col"``.
        stores: Whether it is a store.
    """

    matrix: str
    array: str
    layout: str
    stores: bool = False

    @property
    def name(self) -> str:
        """The function's name."""
        verb = "stores" if self.stores else "loads"
        return f"{verb}{self.matrix}At{self.array.replace('.', '')}{self.layout}"


@dataclass
class Units:
    """The functions of a kernel.

    Attributes:
        accesses: Loads and stores, with the bytes of the array's elements and where it lies.
        products: Layouts of both factors of its products.
        shuffles: Whether it reads float32 values of other lanes, which Slang drops, too.
    """

    accesses: dict[str, tuple[Access, int, str]] = field(default_factory=dict)
    products: set[tuple[str, str]] = field(default_factory=set)
    shuffles: bool = False

    def as_functions(self, code: str) -> str:
        """GLSL without cooperative matrices.

        Raises:
            ValueError: If one is read from, or written to, what is not declared.
        """
        if "coopmat<" not in code:
            return code
        # Slang leaves it out with the functions that are called nowhere else.
        code = _DEAD.sub(r"\1if (false)\n\1{\n\1}\n", code)
        code = re.sub(_MATRIX + r"\(", "filled(", code)
        code = re.sub(_MATRIX, lambda found: _USES[found[1]], code)
        types = {name: kind for kind, name in re.findall(r"\b(Mat[ABC]) (_\w+)\s*[;=]", code)}
        layouts = {found[1]: _layout(found[5]) for found in re.finditer(_LOAD, code)}
        seen: dict[str, Access] = {}
        self.shuffles = "subgroupShuffleXor(" in code
        code = code.replace("subgroupShuffleXor(", "shuffledXor(")

        def product(found: re.Match[str]) -> str:
            pair = layouts[found[1]], layouts[found[2]]
            self.products.add(pair)
            return f"product{pair[0]}{pair[1]}({found[1]}, {found[2]}, {found[3]})"

        def load(found: re.Match[str]) -> str:
            access = Access(types[found[1]], found[2], _layout(found[5]))
            seen[access.name] = access
            return f"{found[1]} = {access.name}({found[3]}, {found[4]})"

        def store(found: re.Match[str]) -> str:
            access = Access("MatC", found[2], "row", stores=True)
            seen[access.name] = access
            value = re.sub(r"^(\w+) \* \((.*)\)$", r"scaled(\1, \2)", found[1])
            return f"{access.name}({value}, {found[3]}, {found[4]})"

        code = re.sub(r"coopMatMulAdd\((\w+), (\w+), (\w+), 0\)", product, code)
        code = re.sub(r"(\w+) \*= (\(filled\(.*\));", r"\1 = scaled(\1, \2);", code)
        code = re.sub(_STORE, store, re.sub(_LOAD, load, code))
        bodies = [self._declared(access, code) for access in seen.values()]
        bodies += [_product(*pair) for pair in sorted(self.products)]
        bodies += [_SHUFFLE] * self.shuffles
        head = code.index("\n", code.index("layout(local_size_x")) + 1
        last = max(found.end() for found in re.finditer(r"^shared .*;\n", code, re.MULTILINE))
        return code[:head] + _TYPES + code[head:last] + "\n".join(bodies) + "\n" + code[last:]

    def _declared(self, access: Access, code: str) -> str:
        """A function that names the array, whose body is PTX later."""
        shared = re.search(rf"shared (\w+) {access.array}\[", code)
        block = access.array.split(".")[0]
        found = shared or re.search(rf"\{{\n\s+(\w+) _m0\[\];\n\}} {block};", code)
        if found is None:
            raise ValueError(f"the GLSL declares no {access.array}")
        element = found[1]
        space = "shared" if shared else "global"
        self.accesses[access.name] = (access, _ELEMENT_BYTES[element], space)
        one = f"{access.array}[at]{'.x' * ('vec' in element)}"
        is_float = not element.startswith("u")
        if access.stores:
            value = "m.v[0] + float(stride)"
            value = value if is_float else f"floatBitsToUint({value})"
            return f"void {access.name}(MatC m, uint at, uint stride) {{ {one} = {value}; }}"
        wanted = access.matrix == "MatC"
        if is_float and not wanted:
            one = f"floatBitsToUint({one})"
        elif wanted and not is_float:
            one = f"uintBitsToFloat({one})"
        stride = "float(stride)" if wanted else "stride"
        return (
            f"{access.matrix} {access.name}(uint at, uint stride) {{ {access.matrix} m;"
            f" for (int i = 0; i < 8; i++) m.v[i] = {one}; m.v[0] += {stride}; return m; }}"
        )

    def as_instructions(self, code: str) -> str:
        """CUDA whose functions are PTX.

        Raises:
            ValueError: If a function is missing, which the kernel has.
        """
        for access, nbytes, space in self.accesses.values():
            made = partial(_access, access, nbytes, space)
            code = _with_body(code, access.name, made)
        for left, right in self.products:
            code = _with_body(code, f"product{left}{right}", partial(_multiply, left, right))
        if self.shuffles:
            code = _with_body(code, "shuffledXor", _shuffle)
        return code


def _layout(name: str) -> str:
    return {"Row": "row", "Column": "col"}[name]


def _product(left: str, right: str) -> str:
    return (
        f"MatC product{left}{right}(MatA a, MatB b, MatC c) {{ MatC m; for (int i = 0; i < 8; i++)"
        " m.v[i] = c.v[i] + float(a.v[i]) * float(b.v[i]); return m; }"
    )


def _with_body(code: str, name: str, made: Callable[[list[str], str], str]) -> str:
    head = re.search(rf"^__device__ [^\n;=]*?\b{name}_\d+\(([^\n]*)\)\n\{{\n", code, re.MULTILINE)
    if head is None:
        raise ValueError(f"the CUDA has no function {name}")
    end = code.index("\n}\n", head.end()) + 1
    args = [arg.split()[-1] for arg in head[1].split(",")]
    return code[: head.end()] + made(args, code[head.end() : end]) + code[end:]


def _registers(first: int) -> str:
    return "{" + ", ".join(f"%{first + i}" for i in range(8)) + "}"


def _found(pattern: str, body: str) -> str:
    found = re.search(pattern, body)
    if found is None:
        raise ValueError(f"{pattern} is not in {body}")
    return found[1]


def _operands(kind: str, name: str, body: str) -> str:
    member = _found(rf"\b{name}\)?(?:->|\.)(v_\d+)\[", body)
    arrow = "." if kind.startswith("=") else "->"
    return ", ".join(f'"{kind}"({name}{arrow}{member}[{i}])' for i in range(8))


def _access(access: Access, nbytes: int, space: str, args: list[str], body: str) -> str:
    place = _found(r"(\(\*&_\w+\)\[at_\d+\]|\(globalParams_\d+->_\w+\)\[at_\d+\])", body)
    stride = (
        f"{args[2 if access.stores else 1]} * {nbytes // (4 if access.matrix == 'MatC' else 2)}U"
    )
    pointer = f"unsigned long long p = __cvta_generic_to_{space}(&({place}));\n"
    if access.stores:
        values = _operands("f", args[0], body)
        return (
            f'{pointer}asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.{space}.f32 [%0], '
            f'{_registers(2)}, %1;" :: "l"(p), "r"({stride}), {values});\n'
        )
    name = _found(_NAME, body)
    kind = f"{_found(_KIND, body)} {name};\n"
    is_sum = access.matrix == "MatC"
    kept, register = ("c", "=f") if is_sum else (access.matrix[-1].lower(), "=r")
    numbers = "f32" if is_sum else "f16"
    return (
        f"{kind}{pointer}asm volatile("
        f'"wmma.load.{kept}.sync.aligned.{access.layout}.m16n16k16.{space}.{numbers} '
        f'{_registers(0)}, [%8], %9;" : {_operands(register, name, body)} : '
        f'"l"(p), "r"({stride}));\n'
        f"return {name};\n"
    )


def _shuffle(args: list[str], body: str) -> str:
    value, mask = args
    return f"return __shfl_xor_sync(0xffffffffU, {value}, {mask});\n"


def _multiply(left: str, right: str, args: list[str], body: str) -> str:
    name = _found(_NAME, body)
    a, b, c = args[:3]
    given = f"{_operands('r', a, body)}, {_operands('r', b, body)}, {_operands('f', c, body)}"
    return (
        f"{_found(_KIND, body)} {name};\n"
        f'asm("wmma.mma.sync.aligned.{left}.{right}.m16n16k16.f32.f32 {_registers(0)}, '
        f'{_registers(8)}, {_registers(16)}, {_registers(24)};" : {_operands("=f", name, body)} : '
        f"{given});\nreturn {name};\n"
    )
