"""The notebooks run from top to bottom, and what they show was made by the code that stands above it."""
import json
import re
import sys

import nbformat
import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))
import execute

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A path from the root, a home folder, a drive.
ABSOLUTE = re.compile(r"(?:^|[\s'\"(=:])(?:/\w[\w.-]*/|~/|[A-Z]:\\)", re.M)
on_each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_five():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@on_each
def test_runs_from_its_own_folder(path):
    fresh = execute.run(read(path))
    said = "".join(o.text for cell in code_cells(fresh) for o in cell.outputs if o.get("name") == "stderr")
    warnings = [line for line in said.splitlines() if "Warning:" in line and "site-packages" not in line]
    assert not warnings, warnings  # progress bars are fine, and what one package says to another is not ours


@on_each
def test_first_cell_runs_from_the_repository_root(path):
    """It finds the scripts and the checkpoints from there as well."""
    notebook = read(path)
    first = notebook.cells.index(code_cells(notebook)[0])
    check = nbformat.v4.new_code_cell("import os, common; print(os.path.exists('grpo.py'))")
    notebook.cells = notebook.cells[:first + 1] + [check]
    assert execute.run(notebook, ROOT).cells[-1].outputs[0].text == "True\n"


@on_each
def test_outputs_are_those_of_the_present_code(path):
    notebook = read(path)
    cells = code_cells(notebook)
    what_to_do = f"run: python notebooks/execute.py {path.name}"
    assert notebook.metadata.get("code_hash") == execute.code_hash(notebook), what_to_do
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) / 2


@on_each
def test_an_edited_code_cell_is_noticed(path):
    notebook = read(path)
    before = execute.code_hash(notebook)
    next(cell for cell in notebook.cells if cell.cell_type == "markdown").source += " A corrected sentence."
    assert execute.code_hash(notebook) == before
    code_cells(notebook)[-1].source += " "
    assert execute.code_hash(notebook) != before


@on_each
def test_shows_no_place_of_the_machine_that_ran_it_and_is_small(path):
    outputs = [o for cell in code_cells(read(path)) for o in cell.outputs]
    text = "\n".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)
    text += "\n" + json.dumps(read(path).metadata)
    assert not ABSOLUTE.findall(text)
    assert path.stat().st_size < 400_000


def test_absolute_paths_are_recognised():
    for text in ("saved in /var/data/x", "'/opt/x'", "File C:\\x", "~/x", "(/a/b"):
        assert ABSOLUTE.search(text), text
    for text in ("runs/x/y", "1/2 and 3 / 4", "+- a/b", "https://x.org/y/z"):
        assert not ABSOLUTE.search(text), text
