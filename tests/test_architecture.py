"""The layers of CONTRIBUTING.md, held against the imports in the sources; imports inside functions count."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def layers() -> list[list[str]]:
    """Names of each line of the block under "## Layers", from the ground up."""
    block = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Layers")[1].split("```")[1]
    return [line.split("  ")[0].split() for line in block.strip().splitlines()]


def sources() -> dict[str, str]:
    """Source text by module name; a package is its `__init__`."""
    paths = sorted((ROOT / "unpad").rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p.read_text(encoding="utf-8") for p in paths}


@cache
def nodes(text: str) -> list[ast.AST]:
    """Every node of a source."""
    return list(ast.walk(ast.parse(text)))


def sources_of_tests() -> dict[str, str]:
    """Source text by name of the modules of tests, as `tests.data.test_images`."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p.read_text(encoding="utf-8") for p in paths}


def imports(files: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(importing module, imported module) for every import of a module of the package."""
    for module, text in files.items():
        for node in nodes(text):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} has a relative import"
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                known = [n for n in (name, name.rpartition(".")[0]) for n in (n, f"{n}.__init__") if n in files]
                yield from [(module, known[0])] if known and known[0] != module else []


def faults(files: dict[str, str]) -> Iterator[str]:
    """Imports from a higher layer, and circles among the files and folders of each folder."""
    edges = set(imports(files))
    floor = {name: number for number, line in enumerate(layers()) for name in line} | {"__init__": len(layers())}
    for module, target in sorted(edges):
        importer, imported = (name.split(".")[1] for name in (module, target))
        if importer != imported and floor[importer] <= floor[imported]:
            yield f"{module} imports {target}, which is not in a layer below"
    for folder in {module.rpartition(".")[0] for module in files}:
        depth, graph = folder.count(".") + 1, TopologicalSorter[str]()
        for edge in edges:
            child, other = (name.split(".") for name in edge)
            if all(name.startswith(f"{folder}.") for name in edge) and child[depth] != other[depth]:
                graph.add(child[depth], other[depth])
        try:
            graph.prepare()
        except CycleError as error:
            yield f"a circle in {folder}: {' -> '.join(error.args[1])}"


def test_every_import_leads_to_a_layer_below_and_there_is_no_circle():
    files = sources()
    assert {module.split(".")[1] for module in files} == {name for line in layers() for name in line} | {"__init__"}
    assert sum(module.count(".") == 1 for module in files) <= 6, "modules beside the packages"
    assert list(faults(files)) == []


@pytest.mark.parametrize("line", ["import unpad.data.text", "def f():\n    from unpad.nn.block import Stream"])
def test_an_import_in_the_wrong_direction_is_found(line):
    files = sources()
    assert list(faults(files | {"unpad.nn.norm": files["unpad.nn.norm"] + "\n" + line}))


def test_shared_layers_name_no_family_of_data():
    for module, text in sources().items():
        if module.split(".")[1] in ("nn", "batching"):
            found = [node for node in nodes(text) if not isinstance(node, ast.alias)]
            names = [getattr(node, "name", getattr(node, "arg", "")) or "" for node in found]
            names += [node.id for node in found if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
            assert not re.findall(r"(?<![a-z])(?:text|images|vqa|patients|events)", " ".join([module, *names]).lower())


def imports_of_tests(files: dict[str, str]) -> list[tuple[str, str]]:
    """The imports of test files; a file that has the name of none but in definitions is not parsed."""
    named = re.compile(r"(?<!def )\btest_")
    texts = {module: text if named.search(text) else "" for module, text in files.items()}
    return [edge for edge in imports(texts) if edge[1].rpartition(".")[2].startswith("test_")]


def test_no_test_file_is_imported_by_another():
    """What tests share is in `tests/helpers/` or beside them, so that a test file is read and moved alone."""
    files = sources_of_tests()
    assert len(files) > 400
    assert imports_of_tests(files) == []
    # In a script that a test starts, too.
    script = re.compile(r"^\s*(?:from|import)\s+tests\.(?:\w+\.)*test_", re.MULTILINE)
    assert [module for module, text in files.items() if script.search(text)] == []
    planted = {"tests.data.test_vqa": "from tests.data import test_images", "tests.one": "import tests.test_cli"}
    assert imports_of_tests(files | planted) == [
        ("tests.data.test_vqa", "tests.data.test_images"),
        ("tests.one", "tests.test_cli"),
    ]


def test_one_folder_decides_how_a_model_is_divided():
    """Elsewhere a recipe's `train.shard` is not read, and its divisions not told apart."""
    deciding = re.compile(r"\btrain\.shard\b(?!=)|isinstance\(.*\b(Sharding|Replicas|FastSum)\b")
    found = {module for module, text in sources().items() if deciding.search(text)}
    assert found, "the rule is about today's names"
    assert {module.rpartition(".")[0] for module in found} <= {"unpad.training.parallel", "unpad.recipes"}


def test_lines_of_kernels_are_as_short_as_those_of_python():
    paths = [*(ROOT / "unpad/nn/native").glob("*.h"), *(ROOT / "unpad/nn/native").glob("*.cpp")]
    assert len(paths) > 10
    lines = [(path.name, line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    assert [place for place in lines if len(place[1]) > 120] == []
