"""ARCHITECTURE.md as a test: who imports whom, and how long a file may be."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flash_kernel

PACKAGE = Path(flash_kernel.__file__).parent
MAX_LINES = 400
KERNEL_FOLDERS = ("_triton.", "_hopper.")

# Lowest first: a module imports from lower layers only, at its top or inside a function.
LAYERS = (
    ("variant", "gradients", "merge", "autocast", "document"),
    (
        *("validation", "shapes", "second_order", "request"),
        *("_triton", "_triton.config", "_hopper", "_hopper.config", "_hopper.compat"),
    ),
    (
        *("reference", "packed", "calls", "_triton.tiles", "_triton.probe", "_triton.prepared"),
        *("_hopper.primitives", "_hopper.tiles", "_hopper.forward_spec"),
        *("_hopper.backward_config", "_hopper.wide_config", "_hopper.reduce"),
    ),
    (
        *("backward", "torch_attention", "mock", "_tolerance", "cache"),
        *("_triton.primitives", "_hopper.pieces"),
    ),
    (
        *("testing", "dispatch", "_triton.exact", "_triton.row_statistics"),
        *("_hopper.softmax", "_hopper.producer"),
        *("_hopper.backward_tiles", "_hopper.backward_step", "_hopper.backward_ends"),
    ),
    (
        *("_triton.forward", "_triton.backward", "_hopper.backward_copies", "_hopper.consumer"),
        *("_hopper.wide_dq_producer", "_hopper.wide_dk_dv_tiles"),
    ),
    (
        *("_triton.launch", "_triton.decode", "_triton.redo_backward"),
        *("_hopper.forward", "_hopper.backward", "_hopper.wide_dq_consumer"),
        *("_hopper.wide_dk_dv_producer", "_hopper.wide_dk_dv_consumer"),
    ),
    (
        *("_triton.launch_backward", "_triton.launch_decode"),
        *("_hopper.launch", "_hopper.wide_dq", "_hopper.wide_dk_dv"),
    ),
    ("_hopper.redo", "_hopper.wide_dk_dv_launch", "_hopper.wide_dq_launch"),
    ("_hopper.backward_launch",),
    ("_hopper.wide_launch",),
    ("autograd", "explain"),
    ("ops", "packed_autograd", "decode"),
    ("sequence_ops",),
    ("api", "varlen", "kvcache"),
    ("function", "flash_attn", "transformers"),
    ("",),  # flash_kernel itself
    ("error_table", "support_matrix"),  # commands
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Every module by its name below flash_kernel, for example ``_triton.launch``."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported_names(path: Path) -> Iterator[str]:
    """Yield what a file imports, anywhere in it: ``module`` or ``module.name``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_siblings(path: Path) -> set[str]:
    """Return the modules of flash_kernel that a file imports."""
    known = modules()
    below = {
        name.partition(".")[2] for name in imported_names(path) if name.startswith("flash_kernel.")
    }
    return {name if name in known else name.rpartition(".")[0] for name in below}


def importers_of(package: str) -> dict[str, list[str]]:
    """Return the modules that import a package, each with what it takes from it."""
    found = {}
    for module, path in modules().items():
        names = [name for name in imported_names(path) if name.partition(".")[0] == package]
        if names:
            found[module] = names
    return found


def test_triton_is_imported_by_the_folders_of_kernels_alone() -> None:
    outside = {
        module: names
        for module, names in importers_of("triton").items()
        if not module.startswith(KERNEL_FOLDERS)
    }
    # dispatch asks Triton for its version, and whether it interprets, once that matters
    assert outside == {"dispatch": ["triton.__version__", "triton.knobs"]}


def test_the_table_of_configurations_can_be_read_without_triton() -> None:
    tables = {"_triton", "_triton.config", "_hopper", "_hopper.config"}
    assert not tables & set(importers_of("triton"))


def test_transformers_is_imported_by_name_when_registering_alone() -> None:
    assert not importers_of("transformers")


def test_the_mock_alone_imports_einx() -> None:
    assert set(importers_of("einx")) == {"mock"}


def test_kernels_import_nothing_outside_their_folder_but_records() -> None:
    records = {"variant", "gradients"}
    for module, path in modules().items():
        if module.startswith(KERNEL_FOLDERS):
            outside = {x for x in imported_siblings(path) if not x.startswith(KERNEL_FOLDERS)}
            assert outside <= records, module


def test_portable_kernels_know_nothing_of_hopper() -> None:
    for module, path in modules().items():
        if module.startswith("_triton."):
            assert not {x for x in imported_siblings(path) if x.startswith("_hopper")}, module


def test_other_packages_of_the_workspace_are_never_imported() -> None:
    assert not importers_of("tiny_llm")
    assert not importers_of("attn_bench")


def test_every_module_has_a_layer() -> None:
    assert set(modules()) == set(LAYER_OF)


def test_no_module_imports_from_its_own_layer_or_above() -> None:
    upward = {
        (module, sibling)
        for module, path in modules().items()
        for sibling in imported_siblings(path)
        if LAYER_OF[sibling] >= LAYER_OF[module]
    }
    assert not upward


def test_files_keep_to_their_size() -> None:
    lengths = {name: len(path.read_text("utf-8").splitlines()) for name, path in modules().items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_the_page_has_these_layers() -> None:
    page = Path(__file__).parents[3] / "ARCHITECTURE.md"
    if not page.is_file():
        pytest.skip("ARCHITECTURE.md does not lie above these tests")
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page.read_text("utf-8"), re.MULTILINE)
    expected = [{name or "flash_kernel" for name in names} for names in LAYERS]
    assert [set(re.findall(r"`([\w.]+)`", modules)) for _, modules in rows] == expected
    assert [int(number) for number, _ in rows] == list(range(1, len(LAYERS) + 1))
