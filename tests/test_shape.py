"""The shape of the code is part of its contract: small files, short functions, honest names."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvcellar"
FILES = sorted(SOURCE.rglob("*.py"))
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PACKAGE_LINES_MAX = 36_000

VAGUE_CLASS = re.compile(r"^_*Base[A-Z]|(Manager|Helper|Helpers|Util|Utils|Handler)$")
VAGUE_MODULE = re.compile(r"^(util|utils|helper|helpers|common|misc)$")
MUTABLE_CALLS = {"bytearray", "defaultdict", "deque", "dict", "list", "set", "OrderedDict"}


def _tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _functions(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _makes_mutable(value):
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else value.func
        name = name.id if isinstance(name, ast.Name) else name
        return name in MUTABLE_CALLS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)


def _module_variables(tree):
    """Yield the lower-case names that a module binds to something that can change."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            constant = isinstance(target, ast.Name) and (
                target.id == "__all__" or target.id.lstrip("_").isupper()
            )
            if not constant and _makes_mutable(value):
                yield ast.unparse(target)


def test_there_is_code_to_look_at():
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_is_small_and_says_what_it_is_for(path):
    tree = _tree(path)
    assert ast.get_docstring(tree), f"{path} has no docstring"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LINES_MAX, f"{path} has {lines} lines"
    long = {
        f.name: f.end_lineno - f.lineno + 1
        for f in _functions(tree)
        if f.end_lineno - f.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert long == {}, f"{path}: functions over {FUNCTION_LINES_MAX} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_has_honest_names_and_no_state(path):
    tree = _tree(path)
    parts = [*path.relative_to(SOURCE).with_suffix("").parts]
    assert [part for part in parts if VAGUE_MODULE.match(part)] == []
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in classes if VAGUE_CLASS.search(name)] == []
    assert list(_module_variables(tree)) == [], "a module keeps no state"


def test_the_whole_fits_in_a_head():
    total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES)
    assert total <= PACKAGE_LINES_MAX
