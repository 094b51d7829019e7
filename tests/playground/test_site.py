"""The playground's folder, and the server that shows it to this machine alone."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import threading
import zipfile
from base64 import b64encode
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from helixpipe.cli.command_playground import first
from helixpipe.common.errors import UserError
from helixpipe.playground import pyodide
from helixpipe.playground.pyodide import FILES, pyodide_files
from helixpipe.playground.serve import server
from helixpipe.playground.site import write_core, write_site
from schedules import CATALOGUE


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package as npm would have fetched, of a few bytes; nothing has been kept yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "pyodide.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for name in (*FILES, "README.md"):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    monkeypatch.setattr(
        pyodide, "INTEGRITY", "sha512-" + b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    )
    return path


def test_a_package_is_unpacked_once_and_kept(package: Path) -> None:
    folder = pyodide_files(str(package))
    package.unlink()
    assert pyodide_files() == folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: name for name in FILES}


def test_another_package_is_refused(package: Path) -> None:
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(UserError, match="is not the package of pyodide"):
        pyodide_files(str(package))
    with pytest.raises(UserError, match="needs npm once"):
        pyodide_files()


def test_the_folder_needs_nothing_else(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    write_site(folder, pyodide_files(str(package)), first(CATALOGUE))
    page = (folder / "index.html").read_text()
    for name in ("style.css", "main.js", "panel.js"):
        assert f'"{name}"' in page and (folder / name).is_file()
    for script in folder.glob("*.js"):
        assert "://" not in script.read_text() and len(script.read_text().splitlines()) <= 500
    shown = json.loads((folder / "first.json").read_text())["first"]
    assert [each["answer"]["figures"]["schedule"] for each in shown] == ["1f1b", "helix"]
    assert all(each["bound"]["bound"] <= each["answer"]["figures"]["makespan"] for each in shown)
    assert {path.name for path in (folder / "pyodide").iterdir()} == set(FILES)


def test_the_core_runs_from_its_archive_without_numpy(tmp_path: Path) -> None:
    write_core(tmp_path / "python.zip")
    with zipfile.ZipFile(tmp_path / "python.zip") as archive:
        assert not [
            name
            for name in archive.namelist()
            if "torch" in name.lower() and "cli" not in name and "lowering" not in name
        ]
        archive.extractall(tmp_path / "core")
    program = """if True:
        import json, sys
        sys.path.insert(0, sys.argv[1])
        sys.modules |= dict.fromkeys(("numpy", "scipy", "matplotlib", "rich", "yaml", "torch"))
        from helixpipe.cli.answers import Answers
        from schedules import CATALOGUE
        costs = ["--model", "llama3-8b", "--memory-limit", "500"]
        ask = json.dumps({"schedule": "zbv", "flags": ["-p", "4", "-m", "4"], "costs": costs, "moves": []})
        answers = Answers(CATALOGUE)
        print(answers.answer(ask)[:12], answers.bound(ask)[:8], len(answers.file(ask, ".html")) > 9000)
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "core")],  # nor what is installed here
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == '{"figures":  {"bound" True', done.stderr


def test_it_is_served_to_this_machine_alone(tmp_path: Path) -> None:
    for name in ("index.html", "main.js", "pyodide.mjs", "pyodide.asm.wasm"):
        (tmp_path / name).write_text(name)
    with server(tmp_path, 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        address = f"http://{serving.server_address[0]!s}:{serving.server_port}/"
        assert serving.server_address[0] == "127.0.0.1"
        types = {}
        for name in ("", "main.js", "pyodide.mjs", "pyodide.asm.wasm"):
            with urlopen(address + name) as answer:
                types[name] = answer.headers.get_content_type()
        assert types == {
            "": "text/html",
            "main.js": "text/javascript",
            "pyodide.mjs": "text/javascript",
            "pyodide.asm.wasm": "application/wasm",
        }
        with pytest.raises(HTTPError):
            urlopen(address + "../secret")
        with pytest.raises(UserError, match=f"--port {serving.server_port} cannot be had"):
            server(tmp_path, serving.server_port)
        serving.shutdown()
