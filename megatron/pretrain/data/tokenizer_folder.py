"""A tokenizer's folder is data: what in it would run code, or lead elsewhere, is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from helixpipe.common.errors import UserError
from helixpipe.common.json_values import parse_json

_PICKLES = (".pkl", ".pickle")
_WITH_CLASSES = ("tokenizer_config.json", "config.json")
"""Files that may name classes of code in the folder, under `auto_map`."""


def check_folder(name: str) -> None:
    """Raise UserError, one sentence that names the file, for a folder that is not data alone.

    name: of --tokenizer-model; what is no folder here is a name of the Hugging Face hub, whose code is not run either.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            raise UserError(
                f"--tokenizer-model {name}: {path.name} is a pickle, which can run code: remove it, or convert it to "
                "tokenizer.json."
            )
        if path.is_symlink() and not _leads_inside(path, folder):
            raise UserError(
                f"--tokenizer-model {name}: {path.name} is a link to {path.readlink()}, which is no file of the "
                "folder: copy there what is meant."
            )
        if not (path.is_file() or path.is_dir()):
            raise UserError(f"--tokenizer-model {name}: {path.name} is neither a file nor a folder; remove it.")
    for file in _WITH_CLASSES:
        if (folder / file).exists():
            _refuse_code(name, folder / file)


def _leads_inside(link: Path, folder: Path) -> bool:
    """Whether a link points into the folder or, for a snapshot in the hub's cache, to the blobs beside it."""
    home = folder.resolve()
    if home.parent.name == "snapshots":
        home = home.parents[1]
    target = link.resolve()
    return target.is_relative_to(home) and (target.is_file() or target.is_dir())


def _refuse_code(name: str, path: Path) -> None:
    try:
        content = parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"--tokenizer-model {name}: {path.name} cannot be read as JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"--tokenizer-model {name}: {path.name} is not a JSON object.")
    classes = content.get("auto_map")
    if classes is not None and (not isinstance(classes, dict) or "AutoTokenizer" in classes):
        raise UserError(
            f"--tokenizer-model {name}: {path.name} asks for code of its own (auto_map), which is never run: take a "
            "tokenizer.json, or remove auto_map if a class of transformers reads the folder."
        )
