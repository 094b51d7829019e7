"""The one part that is compiled, and that everything works without; all else is declared in pyproject.toml.

`helixpipe improve` judges orders some twenty times as fast with it (docs/schedule_search.md). Without a compiler, or
without pybind11 where builds are not isolated, the build goes on and leaves it out.
"""

from setuptools import setup

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
except ImportError:
    setup()
else:
    evaluate = Pybind11Extension(
        "helixpipe.planning.reorder._evaluate", ["helixpipe/planning/reorder/evaluate.cpp"], cxx_std=17, optional=True
    )
    setup(ext_modules=[evaluate], cmdclass={"build_ext": build_ext})
