"""The one part that is compiled, and that everything works without; all else is declared in pyproject.toml.

Plans are judged some ten times as fast with it, and searched orders some twenty times (helixpipe/compiled/__init__.py).
Without a compiler, or without pybind11 where builds are not isolated, the build goes on and leaves it out.
"""

from pathlib import Path

from setuptools import setup

SOURCES = Path("helixpipe/compiled")

try:
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
except ImportError:
    setup()
else:
    ParallelCompile(default=2).install()
    core = Pybind11Extension(
        "helixpipe.compiled._core",
        sorted(map(str, SOURCES.glob("*.cpp"))),
        depends=[str(SOURCES / "core.h")],
        cxx_std=17,
        extra_compile_args=["-ffp-contract=off"],  # sums are those of Python, to the last bit
        optional=True,
    )
    setup(ext_modules=[core], cmdclass={"build_ext": build_ext})
