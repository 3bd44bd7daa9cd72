"""A search of sources for what runs code from data, starts a shell, or opens a port.

It resolves imports and their aliases, not values: `getattr(builtins, "ev" + "al")` passes. It is against mistakes.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

# Modules that unpickle, evaluate or serve, by which a program cannot be safe against what others send.
MODULES = frozenset(
    "pickle _pickle cPickle pickletools marshal shelve dbm dill cloudpickle joblib jsonpickle copyreg multiprocessing "
    "torch.multiprocessing torch.distributed.rpc torch.package torch.hub code codeop imp asyncio xmlrpc socketserver "
    "http.server wsgiref".split()
)
NAMES = frozenset(
    "concurrent.futures.ProcessPoolExecutor concurrent.futures.process.ProcessPoolExecutor torch.jit.load "
    "torch.distributed.TCPStore torch.distributed.init_process_group yaml.load yaml.unsafe_load yaml.full_load "
    "numpy.fromregex pandas.read_pickle pandas.eval os.system os.popen subprocess.getoutput subprocess.getstatusoutput "
    "runpy.run_path runpy.run_module socket.create_server importlib.util.spec_from_file_location "
    "importlib.metadata.entry_points".split()
)
BUILTINS = frozenset({"eval", "exec", "compile", "__import__", "input", "breakpoint"})
# Methods by any name of their object. The collectives of objects pickle: all_gather_object, broadcast_object_list, ..
METHODS = re.compile(
    r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?|bind|listen|extractall|unpack_archive|read_pickle|"
    r"start_server|serve_forever|exec_module|eval_str|execl?[vpe]*"
)
UNLESS = {"torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False)}  # the keyword must be there
NEVER = {"shell": True, "allow_pickle": True, "weights_only": False}  # keywords of any call, with a value other than ..


def dangers(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, what) for each import, name, method or keyword of a source that is listed above."""
    tree = ast.parse(source)
    imported = dict(_imports(tree))
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in sorted({*_modules(node)} & MODULES):
                yield node.lineno, name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _resolved(node, imported)
            method = node.attr if isinstance(node, ast.Attribute) else name.rpartition(".")[2]
            if name in NAMES | BUILTINS or name in MODULES and "." in name:
                yield node.lineno, name
            elif name == "importlib.import_module" and not _of_constant(called.get(id(node))):
                yield node.lineno, "import_module of a name"
            elif METHODS.fullmatch(method) and (isinstance(node, ast.Attribute) or "." in name):
                yield node.lineno, method
            elif name in UNLESS and id(node) not in called:
                yield node.lineno, f"{name} uncalled"
        if isinstance(node, ast.Call):
            yield from _keywords(node, _resolved(node.func, imported))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields (local name, dotted name) of all that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                yield (each.asname, each.name) if each.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields the modules that an import loads or may name, with the packages around them."""
    if isinstance(node, ast.ImportFrom) and node.level:
        return
    names = [each.name for each in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{name}" for name in names]
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _resolved(node: ast.expr, imported: Mapping[str, str]) -> str:
    """Returns the dotted name of an expression such as `np.load`, as "numpy.load"; "" if it starts with no name."""
    if isinstance(node, ast.Attribute):
        base = _resolved(node.value, imported)
        return f"{base}.{node.attr}" if base else ""
    return imported.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _keywords(call: ast.Call, name: str) -> Iterator[tuple[int, str]]:
    given = {each.arg: each.value for each in call.keywords if each.arg}
    values = {key: value.value if isinstance(value, ast.Constant) else None for key, value in given.items()}
    for key, bad in NEVER.items():
        if key in given and values[key] is not (not bad):
            yield call.lineno, f"{key}={ast.unparse(given[key])}"
    if name in UNLESS:
        key, right = UNLESS[name]
        if key not in given:
            yield call.lineno, f"{name} without {key}={right}"


def _of_constant(call: ast.Call | None) -> bool:
    return call is not None and bool(call.args) and isinstance(call.args[0], ast.Constant)


def found_in(top: Path) -> Counter[tuple[str, str]]:
    """Returns how often each danger occurs, by file below `top` and danger."""
    return Counter(
        (str(path.relative_to(top)), what)
        for path in sorted(top.rglob("*.py"))
        for _, what in dangers(path.read_text(encoding="utf-8"))
    )
