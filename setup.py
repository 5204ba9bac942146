"""Build the CPU's kernels where there is a compiler; their twins in torch give the same bits."""

from setuptools import Extension, setup

STREAMING = "hpczero/comm/streaming.h"


def kernel(name, source, *headers, openmp=False):
    """Return a library of plain C functions that is left out where it can't be built."""
    flags = ["-fopenmp"] if openmp else []
    return Extension(
        name,
        [source],
        depends=["hpczero/floats.h", *headers],
        # No contraction: a fused multiply-add would round otherwise than the twin does.
        extra_compile_args=[
            "-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
            *flags,
        ],
        extra_link_args=flags,
        optional=True,
    )  # fmt: skip


setup(
    ext_modules=[
        kernel(
            "hpczero.gpu._adam_cpu",
            "hpczero/gpu/adam_cpu.cpp",
            "hpczero/gpu/adam.h",
            openmp=True,
        ),
        kernel("hpczero.gpu._norm_cpu", "hpczero/gpu/norm_cpu.cpp", openmp=True),
        kernel("hpczero.comm._sum_cpu", "hpczero/comm/sum_cpu.cpp", STREAMING),
        kernel("hpczero.comm._copy_cpu", "hpczero/comm/copy_cpu.cpp", STREAMING, openmp=True),
    ]
)
