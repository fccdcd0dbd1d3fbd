"""What a reader of the package has to hold in mind, counted in its sources and along one short run, and its ceilings.

    make size

Code lines are lines with code: no docstrings, comments or blank lines. Reach counts the modules of the package that an
import of `unpad/training/loop.py` loads, following imports at the top level of modules alone. Calls are functions of
the package on the stack of a training run of the toy text model, from the verb `train` on.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENTRY = "unpad.training.loop"
FAMILIES = ("text", "images", "vqa", "patients")
FAMILY_DATA = {"TextData", "ImageData", "VqaData", "EventData"}
# Folders and files that belong to families: their modules may name them.
OWN = re.compile(
    r"unpad/(data/(tokens|pixels|pictures|histories)/|(data|evaluation|inference)/(text|images|vqa|patients)\.py)"
)
SEVERAL_MEANINGS = {"Config"}  # class names that may stand for several things
PAGES = ("README*.md", "docs/**/*.md", "benchmarks/*.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
STRING = re.compile(
    r"""^[ \t]*[rR]?(?P<docstring>\"{3}|'{3})(?:\\.|.)*?(?P=docstring)[ \t]*(?:\#[^\n]*)?$"""
    r"""|(?P<long>\"{3}|'{3})(?:\\.|.)*?(?P=long)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*""",
    re.DOTALL | re.MULTILINE,
)
# A commit that raises a count lowers the same one elsewhere by as much; ceilings only fall.
CEILINGS = {
    "code lines of the package": 48_200,
    "code lines of tests": 51_580,
    "code lines of benchmarks": 9_000,
    "words of pages": 101_700,
    "processor seconds of make test": 500,  # on an AMD EPYC with AVX-512 BF16; tests/conftest.py counts them
    "files": 351,
    "doubled class names": 0,
    "modules from training/loop.py": 101,
    "family names outside of families": 0,
    "imports between test files": 0,
    "files in the largest folder": 22,
    "short modules with one importer": 1,
}


def sources(folder: str = "unpad") -> dict[str, str]:
    """Text of every Python file of a folder, by its path from the root."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements and all those within them; expressions, which are most of a tree, are not entered."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, name, []))
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            yield from statements(part.body)


@cache
def code_lines(text: str) -> int:
    """Lines with code, without docstrings, comments and blanks."""
    return sum(bool(line.strip()) for line in STRING.sub(_stand_in, text).split("\n"))


def _stand_in(found: re.Match[str]) -> str:
    """As many lines as a string has; nothing for a docstring or a comment."""
    if found["docstring"] or found[0].startswith("#"):
        return ""
    return "x\n" * found[0].count("\n") + "x"


def num_words() -> int:
    """Words of all pages, as `wc -w` counts them."""
    return sum(len(path.read_text(encoding="utf-8").split()) for pattern in PAGES for path in ROOT.glob(pattern))


def num_functions(files: dict[str, str]) -> int:
    nodes = (node for text in files.values() for node in statements(parsed(text).body))
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)


def doubled_names(files: dict[str, str]) -> list[str]:
    """Names of classes that are defined at the top of several modules."""
    names = Counter(
        node.name for text in files.values() for node in parsed(text).body if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, num in names.items() if num > 1 and name not in SEVERAL_MEANINGS)


def reached(files: dict[str, str], entry: str = ENTRY) -> set[str]:
    """Modules that an import of `entry` loads by top-level imports, packages' own files left out."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    found, left = set[str](), [entry]
    while left:
        module = left.pop()
        if module in found or module not in modules:
            continue
        found.add(module)
        for node in _top_level(parsed(files[modules[module]]).body):
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {module for module in found if not modules[module].endswith("/__init__.py")}


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, without those for type checkers."""
    for node in body:
        if isinstance(node, ast.If):
            typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            yield from _top_level(node.orelse if typing else [*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _top_level([*node.body, *node.orelse, *node.finalbody])
        else:
            yield node


def family_names(files: dict[str, str]) -> list[str]:
    """Places outside of the families' own files that ask which family it is: `isinstance`, or a name compared."""
    places = []
    for path, text in files.items():
        if OWN.match(path):
            continue
        for node in ast.walk(parsed(text)):
            if _asks_class(node) or _asks_name(node):
                assert isinstance(node, ast.expr)
                places.append(f"{path}:{node.lineno}")
    return places


def _asks_class(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"):
        return False
    return any(isinstance(part, ast.Name) and part.id in FAMILY_DATA for part in ast.walk(node.args[1]))


def _asks_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    asked = any(getattr(side, "attr", getattr(side, "id", "")) in ("family", "family_name") for side in sides)
    texts = (part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant))
    return asked and any(text in FAMILIES for text in texts)


def imports_of_tests(files: dict[str, str]) -> list[str]:
    """Imports of one test file from another."""
    script = re.compile(r"^\s*((?:from|import)\s+tests\.(?:\w+\.)*test_)", re.MULTILINE)
    places = []
    for path, text in files.items():
        for found in script.finditer(text):
            line = text.count("\n", 0, found.start(1)) + 1
            places.append(f"{path}:{line}")
    return places


def largest_folder(files: dict[str, str]) -> tuple[int, str]:
    """Files, and name, of the folder with the most files beside its folders; `__init__.py` is not counted."""
    counts = Counter(path.rpartition("/")[0] for path in files if not path.endswith("__init__.py"))
    name, num = counts.most_common(1)[0]
    return num, name


def short_modules(files: dict[str, str], least: int = 80) -> list[str]:
    """Modules of fewer code lines than `least` that one other module of the same package alone imports.

    A module whose first line says why it is apart is none, nor is one that the package itself collects.
    """
    modules = {path.removesuffix(".py").replace("/", "."): path for path in files if not path.endswith("__init__.py")}
    importers: dict[str, set[str]] = {module: set() for module in modules}
    for path, text in files.items():
        for node in statements(parsed(text).body):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    if name in importers:
                        importers[name].add(path)
    return [
        path
        for module, path in modules.items()
        if code_lines(files[path]) < least
        and " (apart: " not in files[path].partition("\n")[0]
        and len(importers[module]) == 1
        and (importer := next(iter(importers[module]))).rpartition("/")[0] == path.rpartition("/")[0]
        and not importer.endswith("__init__.py")
    ]


PROBE = """
import json, sys, traceback
from pathlib import Path

import unpad
from unpad.cli.main import main
from unpad.models.decoder import Decoder
from unpad.training.optim import AdamW

package = str(Path(unpad.__file__).parent)
found = {}


def watched(kind, name):
    inner = getattr(kind, name)

    def outer(*args, **kwargs):
        if name not in found:
            frames = [frame for frame in traceback.extract_stack()[:-1] if frame.filename.startswith(package)]
            named = [(frame.filename[len(package) + 1 :], frame.name) for frame in frames if frame.name[0] != "<"]
            found[name] = [*(f"{file}:{function}" for file, function in named), name]
            Path("calls.json").write_text(json.dumps(found))
        return inner(*args, **kwargs)

    setattr(kind, name, outer)


watched(Decoder, "losses")
watched(AdamW, "step")
main()
"""


def calls(folder: Path) -> dict[str, list[str]]:
    """Calls from the verb `train` to the first `Decoder.losses` and to the first `AdamW.step`, these included."""
    words = ["unpad", "train", "zh_chat", "train.max_steps=2", "--out", str(folder / "run")]
    program = f"import sys; sys.argv = {words!r}\n{PROBE}"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, capture_output=True)
    stacks: dict[str, list[str]] = json.loads((folder / "calls.json").read_text(encoding="utf-8"))
    return {name: stack[stack.index("cli/training.py:train") + 1 :] for name, stack in stacks.items()}


def counts() -> dict[str, int]:
    """All that is counted without running anything."""
    files, tests = sources(), sources("tests")
    modules = reached(files)
    paths = {path.removesuffix(".py").replace("/", "."): path for path in files}
    return {
        "code lines of the package": sum(map(code_lines, files.values())),
        "code lines of tests": sum(map(code_lines, tests.values())),
        "code lines of benchmarks": sum(map(code_lines, sources("benchmarks").values())),
        "words of pages": num_words(),
        "files": len(files),
        "functions": num_functions(files),
        "doubled class names": len(doubled_names(files)),
        "modules from training/loop.py": len(modules),
        "their code lines": sum(code_lines(files[paths[module]]) for module in modules),
        "family names outside of families": len(family_names(files)),
        "imports between test files": len(imports_of_tests(tests)),
        "files in the largest folder": largest_folder(files)[0],
        "short modules with one importer": len(short_modules(files)),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stacks = calls(Path(folder))
    for name, number in counts().items():
        print(f"{name:34}{number:8,}" + (f"  at most {CEILINGS[name]:,}" if name in CEILINGS else ""))
    for name, stack in stacks.items():
        print(f"{'calls from the verb to ' + name:34}{len(stack):8,}")
    if "--all" in sys.argv:
        files, tests = sources(), sources("tests")
        lists = {
            "doubled class names": doubled_names(files),
            "family names outside": family_names(files),
            "imports between test files": imports_of_tests(tests),
            "short modules": short_modules(files),
            **{f"calls to {name}": stack for name, stack in stacks.items()},
        }
        for title, items in lists.items():
            print(f"\n{title}:", *items, sep="\n  ")


if __name__ == "__main__":
    main()
