"""The parts that are compiled, and that everything else works without; all else is declared in pyproject.toml.

- helixpipe.compiled: plans are judged some ten times as fast with it, and searched orders some twenty times. Without a
  compiler, or without pybind11 where builds are not isolated, the build goes on and leaves it out.
- helixpipe.fake_cuda: for `helixpipe dry-run`, where the environment that builds has a torch without CUDA.
"""

from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup

PLANS, FAKE = Path("helixpipe/compiled"), Path("helixpipe/fake_cuda")


def fake_cuda():
    """Return the extension of the fake device; none without torch, or with one for CUDA."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return []
    torch = Path(spec.submodule_search_locations[0])
    if (torch / "lib" / "libtorch_cuda.so").exists() or not (torch / "lib" / "libtorch_python.so").exists():
        return []
    return [
        Extension(
            "helixpipe.fake_cuda._device",
            sorted(map(str, FAKE.glob("*.cpp"))),
            depends=[str(FAKE / "device.h")],
            include_dirs=[str(torch / "include"), str(torch / "include/torch/csrc/api/include")],
            library_dirs=[str(torch / "lib")],
            libraries=["c10", "torch_cpu", "torch", "torch_python"],
            extra_compile_args=["-std=c++20", "-O1", "-g0", "-w"],  # torch's headers warn
            language="c++",
            optional=True,
        )
    ]


try:
    from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
except ImportError:
    setup()
else:
    ParallelCompile(default=2).install()
    core = Pybind11Extension(
        "helixpipe.compiled._core",
        sorted(map(str, PLANS.glob("*.cpp"))),
        depends=[str(PLANS / "core.h")],
        cxx_std=17,
        extra_compile_args=["-ffp-contract=off"],  # sums are those of Python, to the last bit
        optional=True,
    )
    setup(ext_modules=[core, *fake_cuda()], cmdclass={"build_ext": build_ext})
