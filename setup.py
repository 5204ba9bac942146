"""Build the CPU's Adam where there is a compiler; its twin in torch gives the same bits without."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "hpczero.gpu._adam_cpu",
            ["hpczero/gpu/adam_cpu.cpp"],
            depends=["hpczero/gpu/adam.h"],
            # No contraction: a fused multiply-add would round otherwise than the twin does.
            extra_compile_args=[
                "-O3", "-std=c++17", "-fopenmp",
                "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ]
)  # fmt: skip
