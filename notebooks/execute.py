"""Execute notebooks and store what they print and draw, so that readers see it without running anything.

    python notebooks/execute.py                all of them
    python notebooks/execute.py 01 03          those whose names start so

Beside the outputs the file keeps a hash of its code cells. The tests compute that hash anew: outputs that are older
than the code above them are found. Needs: pip install nbclient nbformat ipykernel
"""
import hashlib
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent


def code_hash(notebook):
    """sha256 of the sources of all code cells, in order. Text cells may be corrected without running anything."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            digest.update(cell.source.encode() + b"\0")  # the separator: moving a line to the next cell is a change too
    return digest.hexdigest()


def run(notebook, folder=FOLDER):
    """A freshly executed copy; `folder` is the working directory. Raises CellExecutionError where a cell fails."""
    copy = nbformat.from_dict(notebook)
    NotebookClient(copy, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}},
                   record_timing=False).execute()  # times would change the file at every run
    return copy


def tidy(notebook):
    """Keep what a reader needs, in place: no progress bars (all of stderr), no versions of the machine that ran it."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            kept, cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"], []
            for output in kept:
                if cell.outputs and output.get("name") == cell.outputs[-1].get("name") == "stdout":
                    cell.outputs[-1].text += output.text  # a progress bar stood between them
                else:
                    cell.outputs.append(output)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                         "code_hash": code_hash(notebook)}


def main(names):
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and not path.name.startswith(tuple(names)):
            continue
        start = time.time()
        notebook = run(nbformat.read(path, as_version=4))
        tidy(notebook)
        temporary = path.with_suffix(".tmp")  # written whole and renamed: an interruption leaves the old file
        nbformat.write(notebook, temporary)
        os.replace(temporary, path)
        print(f"{path.name}: {time.time() - start:.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
